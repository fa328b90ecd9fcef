"""Reads shards by stock FFCV, the extra `[ffcv]`, and compares its pixels with ours.

FFCV believes whatever a damaged file says, so that only shards which were verified before are given to it.
"""

from importlib.metadata import version
from pathlib import Path

import numpy as np

from vitscale.data.shards.beton import MODE_JPEG, ShardFile
from vitscale.ground.errors import RecipeError
from vitscale.ground.images import decode


class StockReader:
    """FFCV's own reader of files and pages, and its decoder. Raises RecipeError if it cannot be imported."""

    def __init__(self) -> None:
        try:
            from ffcv.libffcv import imdecode
            from ffcv.memory_managers import OSCacheManager
            from ffcv.reader import Reader
        except (ImportError, OSError) as error:  # OSError: a library that it was built with is gone
            raise RecipeError(
                f"stock FFCV is not installed here ({error}): pip install 'vitscale[ffcv]', which compiles it and "
                "needs g++ pkg-config libopencv-dev libturbojpeg0-dev (Debian's names) and the header files of Python"
            ) from None
        self.version = version("ffcv")
        self._reader, self._pages, self._imdecode = Reader, OSCacheManager, imdecode

    def differing(self, path: Path, shard: ShardFile, image_field: str) -> np.ndarray:
        """The slots, bool (samples,), whose image FFCV decodes to other pixels than we do, or not at all.

        `shard` is the sound shard at `path`, open; `image_field` its field of images.
        """
        reader = self._reader(str(path))
        rows = reader.metadata[f"f{reader.field_names.index(image_field)}"]
        pages = self._pages(reader)
        read, differs = pages.compile_reader(), np.ones(shard.samples, bool)
        with pages.schedule_epoch([]) as context:
            for slot, row in enumerate(rows):
                height, width = int(row["height"]), int(row["width"])
                theirs, ours = np.zeros((height, width, 3), np.uint8), shard.read(slot)
                stored = read(row["data_ptr"], context.state)
                if row["mode"] == MODE_JPEG:
                    failed = self._imdecode(stored, theirs, height, width, height, width)
                    status, pixels = decode(ours, height, width)
                    differs[slot] = bool(failed or status) or not np.array_equal(theirs, pixels)
                else:
                    differs[slot] = not np.array_equal(stored, np.frombuffer(ours, np.uint8))
        return differs
