"""Where images come from: one file a kind of source, all behind one small interface."""

from pathlib import Path

from data_tools.sources.folder import FolderSource
from data_tools.sources.listing import IMAGE_SUFFIXES, Entry, Listing, Source, list_images
from data_tools.sources.tar import TAR_SUFFIXES, open_tar
from vitscale.errors import RecipeError

__all__ = ["IMAGE_SUFFIXES", "Entry", "Listing", "Source", "check_source", "list_images", "open_source"]


def check_source(path: Path) -> None:
    """Raise RecipeError where there is nothing at `path`, or nothing of a kind that is understood."""
    if not path.exists():
        raise RecipeError(f"SRC {path}: no such file or directory")
    if not path.is_dir() and not path.name.lower().endswith(tuple(TAR_SUFFIXES)):
        raise RecipeError(
            f"SRC {path}: a file that is none of {', '.join(TAR_SUFFIXES)}. "
            "Expected a folder of class folders with images in them, or a tar of one"
        )


def open_source(path: Path, work: Path) -> Source:
    """The source at `path`. A compressed tar is unpacked once into the folder `work`, for random access.

    Raises:
        RecipeError: see `check_source`.
        DataError: a damaged archive.
    """
    check_source(path)
    return FolderSource(path) if path.is_dir() else open_tar(path, work)
