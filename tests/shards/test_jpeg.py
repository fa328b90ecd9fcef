import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from vitscale.errors import RecipeError
from vitscale.shards import jpeg


def test_decodes_like_pillow(photos):
    for photo in photos[:5]:
        with Image.open(io.BytesIO(photo)) as image:
            expected = np.asarray(image).astype(int)
        status, rgb = jpeg.decode(photo, *expected.shape[:2])
        assert status == 0
        assert np.abs(rgb - expected).mean() < 1.5  # FFCV uses the fast DCT, Pillow the exact one


def test_decodes_gray_to_rgb():
    out = io.BytesIO()
    Image.new("L", (16, 8), 77).save(out, "JPEG")
    status, rgb = jpeg.decode(np.frombuffer(out.getvalue(), np.uint8), 8, 16)
    assert status == 0 and (rgb == 77).all()


@pytest.mark.parametrize("damage", [lambda j: b"", lambda j: j[: len(j) // 2], lambda j: bytes(len(j))])
def test_damage_has_a_status(photos, damage):
    assert jpeg.decode(damage(photos[0]), 40, 64)[0] != 0


def test_missing_ffcv_names_the_command(monkeypatch):
    monkeypatch.setattr(jpeg.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install ffcv"):
        jpeg._find_library()


def test_heavy_packages_are_not_imported():
    loaded = "print(*{'torch', 'ffcv', 'cv2'} & set(sys.modules))"
    code = f"import sys, vitscale.shards.jpeg, data_tools.conversion; {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
