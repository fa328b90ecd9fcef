"""What several tests share: real data where they exist, a small folder of images where they do not matter."""

import os

# Two ranks share this machine whatever it has, and results are compared with those of a CPU. What is marked `gpu` gives
# its own processes back what was visible.
if "PYTEST_XDIST_WORKER" not in os.environ and "CUDA_VISIBLE_DEVICES" in os.environ:
    os.environ["VITSCALE_TEST_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# torch's threads otherwise wait by spinning. Where several processes share the cores that took ten times the CPU time,
# and most of it from the one that was waited for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pictures import encoded, make_picture
from PIL import Image
from s3_server import S3Server, serving

# What is known of shards between runs is that of the tests' own, not of whoever runs them.
_CACHE = tempfile.TemporaryDirectory(prefix="vitscale-tests-")
os.environ["VITSCALE_CACHE"] = _CACHE.name

# What a shell starts in the background ignores Ctrl-C, and so would what the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent
# Modules and rooms of which a file takes longest. Where several files run at a time these begin first, so that no
# process is left with one of them when the others have nothing more to do.
LONG = {"test_package", "test_readme", "test_python_page", "test_command_line", "test_face", "training", "launch"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: LONG.isdisjoint({item.path.stem, item.path.parent.name}))


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets; a test that asks for it is skipped where there is none."""
    root = Path(os.environ.get("VITSCALE_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not root.is_dir():
        pytest.skip(f"no real data at {root} (set VITSCALE_TEST_DATA)")
    return root.resolve()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server."""
    yield from serving(tmp_path_factory.mktemp("s3"))


@pytest.fixture(scope="session")
def photos() -> list[bytes]:
    """20 baseline JPEGs of several sizes, decoded cleanly by FFCV."""
    return [encoded(make_picture(i, 40 + 3 * i, 64 - i), quality=90) for i in range(20)]


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory, photos: list[bytes]) -> Path:
    """20 JPEGs, one PNG with alpha and one turned JPEG in the classes cat, dog and owl; and two files to ignore."""
    root = tmp_path_factory.mktemp("images")
    for i, photo in enumerate(photos):
        path = root / ("cat", "dog", "owl")[i % 3] / "nested" / f"{i:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo)
    (root / "owl" / "alpha.png").write_bytes(encoded(make_picture(90, 30, 50).convert("RGBA"), "PNG"))
    exif = Image.Exif()
    exif[0x0112] = 6
    (root / "dog" / "turned.JPG").write_bytes(encoded(make_picture(91, 30, 50), exif=exif))
    (root / "readme.txt").write_text("not an image")
    (root / "cat" / ".hidden.jpg").write_bytes(photos[0])
    return root
