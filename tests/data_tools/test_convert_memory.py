"""The memory of a conversion does not depend on the number of images."""

from pathlib import Path

import pytest
from pictures import encoded, make_picture
from python_processes import run_python
from small_files import write_tar

MEASURED = """
import resource, sys
from data_tools.conversion import convert
from data_tools.machine import Machine
from data_tools.request import Request
if __name__ == "__main__":
    samples = convert(Request(sys.argv[1], shard_samples=500), sys.argv[2], Machine(workers=2)).totals.samples
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(samples, *peaks)
"""


def peaks_of(folder: Path, images: int, mode: str) -> tuple[int, int]:
    """KiB of the converter, and of its largest worker."""
    source = folder / f"{images}.tar{mode.replace('w', '').replace(':', '.')}"
    contents = [encoded(make_picture(i, 16, 16)) for i in range(50)]
    names = (f"class{i % 10}/some/longer/path/of/an/image-{i:08d}.jpg" for i in range(images))
    write_tar(source, *((name, contents[i % 50]) for i, name in enumerate(names)), mode=mode)
    printed = run_python(MEASURED, source, folder / f"out{images}{mode[-1]}", timeout=500)
    samples, own, worker = map(int, printed.split())
    assert samples == images
    return own, worker


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_peak_is_the_same_for_1000_and_50000_images(tmp_path, mode):
    few, many = peaks_of(tmp_path, 1000, mode), peaks_of(tmp_path, 50_000, mode)
    # 49,000 more images of 50 bytes of names would be 2.4 MB; a list of them in Python 10 MB and more.
    for small, large in zip(few, many, strict=True):
        assert large < small + 32 * 1024, (few, many)
