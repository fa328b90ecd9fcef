"""Files of FFCV's own writer, as people have them."""

import contextlib
import io
from pathlib import Path
from typing import Any

SMALLEST_PAGE = 2 << 20


def write_stock(
    path: Path, fields: dict[str, Any], rows: list[tuple[Any, ...]], page_size: int = SMALLEST_PAGE, workers: int = 1
) -> Path:
    """A .beton of these rows, one value a field, by `ffcv.writer.DatasetWriter`."""
    from ffcv.writer import DatasetWriter

    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        DatasetWriter(str(path), fields, page_size=page_size, num_workers=workers).from_indexed_dataset(
            rows, chunksize=3
        )
    return path
