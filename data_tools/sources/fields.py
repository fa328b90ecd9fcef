"""Finds the image and the label among the columns or features of a record where the user has not named them."""

from collections.abc import Iterable, Sequence

from data_tools.sources.source import SourceOptions
from vitscale.ground.errors import RecipeError

NO_LABELS = "none"  # --label-field none
IMAGE_NAMES = frozenset(
    {"path", "file", "filepath", "file_path", "file_name", "filename", "image", "image_path", "url", "uri"}
)
_LABEL_NAMES = frozenset({"label", "labels", "class", "class_name", "class_id", "target", "cls"})


def choose_image(columns: Sequence[str], candidates: Sequence[str], options: SourceOptions, where: str) -> str:
    """The column of images: the user's choice, else the only candidate. Raises RecipeError."""
    return _choose(columns, candidates, options.image_field, "images", "--image-field NAME", where)


def choose_label(columns: Sequence[str], candidates: Sequence[str], options: SourceOptions, where: str) -> str | None:
    """The column of labels: the user's choice, else the only candidate; None for no labels. Raises RecipeError."""
    if options.label_field == NO_LABELS and NO_LABELS not in columns:
        return None
    flags = f"--label-field NAME, or --label-field {NO_LABELS} for images without labels"
    return _choose(columns, candidates, options.label_field, "labels", flags, where)


def label_columns(columns: Iterable[str]) -> list[str]:
    """The columns named like labels; if classes have both a name and a number column, only the names."""
    found = {column.lower(): column for column in columns if column.lower() in _LABEL_NAMES}
    if "class_name" in found:
        return [found["class_name"]]
    if len(found) > 1:
        found.pop("class_id", None)
    return list(found.values())


def refuse_fields(options: SourceOptions, kind: str) -> None:
    """Raise RecipeError if the user names fields of a source that has none to choose from."""
    for flag, value in (("--image-field", options.image_field), ("--label-field", options.label_field)):
        if value is not None:
            raise RecipeError(f"{flag} {value}: {kind} has no fields to choose from; leave it out")


def _choose(
    columns: Sequence[str], candidates: Sequence[str], wanted: str | None, what: str, flags: str, where: str
) -> str:
    there = f"there are {', '.join(columns) or 'none'}"
    if wanted is not None:
        if wanted in columns:
            return wanted
        raise RecipeError(f"{where}: no column {wanted!r}; {there}")
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise RecipeError(f"{where}: {what} may be in any of the columns {', '.join(candidates)}. Say which: {flags}")
    raise RecipeError(f"{where}: no column that is known to hold {what}; {there}. Say which: {flags}")
