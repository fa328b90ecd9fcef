"""The preprocessing of our models' images as other libraries have it: resized, the centre cut out, normalised."""

from contextlib import suppress

import pydantic

from vitscale.ground.wording import shortened
from vitscale.recipe import EvalCrop, Normalise

WHOLE_PICTURE = EvalCrop(kind="square", fraction=1)
"""The crop written where a source names none: the whole picture as a square, as Google's fine-tuned models see it."""
_LONGEST_EDGE = 1_000_000  # pixels
_RESIZE_OF = {"bilinear": "pil_bilinear", "bicubic": "pil_bicubic"}


def resized_edge(image_size: int, crop: EvalCrop) -> int:
    """Edge in pixels to resize to, of which the central `image_size` are kept.

    The difference is even: half a pixel to one side, which is what libraries make of an odd one, moves more of the
    model's input than a scale that is up to a pixel wrong at the border.
    """
    return image_size + 2 * round((image_size / crop.fraction - image_size) / 2)


def resize_of(filter_name: object) -> str:
    """Our name for a resizing filter of other libraries; our own method if it is none of Pillow's two."""
    return _RESIZE_OF.get(str(filter_name), "area")


def filter_of(crop: EvalCrop) -> str:
    """The filter nearest to a crop's way of resizing in other libraries, which all have Pillow's filters.

    Bilinear with antialiasing is the nearest to our mean over areas; none is without antialiasing.
    """
    return "bicubic" if crop.resize == "pil_bicubic" else "bilinear"


def crop_of(edge: object, side: object, *, is_square: bool, resize: str) -> EvalCrop | None:
    """The crop that keeps the central `side` of `edge` pixels; None if these are not such numbers."""
    numbers = [number for number in (edge, side) if isinstance(number, int | float) and 0 < number <= _LONGEST_EDGE]
    if len(numbers) < 2 or numbers[1] > numbers[0]:
        return None
    content = {"kind": "square" if is_square else "central", "fraction": numbers[1] / numbers[0], "resize": resize}
    return EvalCrop.model_validate(content)


def otherwise(crop: EvalCrop | None, filter_name: object) -> tuple[str, ...]:
    """Notes on how pictures are prepared otherwise here than a source says."""
    if crop is None:
        return ("what its preprocessing shows of a picture is none of our crops: here it is the whole, as a square",)
    if str(filter_name) in _RESIZE_OF:
        return ()
    named = "names no filter that we have" if filter_name is None else f"resizes by {shortened(repr(filter_name))}"
    return (f"its preprocessing {named}: here pictures are resized by area",)


def normalise_of(mean: object, std: object) -> Normalise | None:
    """A normalisation from a file's numbers; None if these are not such numbers."""
    with suppress(pydantic.ValidationError):
        return Normalise.model_validate({"mean": mean, "std": std})
    return None
