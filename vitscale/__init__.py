"""vitscale: pre-train Vision Transformers at scale, on your own hardware."""

import os
from pathlib import Path

__version__ = "0.1.0"


def _choose_kernel_cache() -> None:
    """Give numba a folder for compiled kernels if neither the installation nor the home directory can be written.

    Otherwise it would refuse to compile at all, for example in a container with a read-only image.
    """
    usual = (Path(__file__).parent, Path.home() / ".cache", Path.home())
    if "NUMBA_CACHE_DIR" not in os.environ and not any(os.access(place, os.W_OK) for place in usual):
        import tempfile

        os.environ["NUMBA_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"vitscale-kernels-{os.getuid()}")


_choose_kernel_cache()
