"""The preprocessing of our models' images as other libraries have it: resized, the centre cut out, normalised."""

import math

import pydantic

from vitscale.recipe import EvalCrop, Normalise

WHOLE_PICTURE = EvalCrop(kind="square", fraction=1)
"""The crop written where a source names none: the whole picture as a square, as Google's fine-tuned models see it."""
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
    numbers = [number for number in (edge, side) if isinstance(number, int | float) and math.isfinite(number)]
    if len(numbers) < 2 or not 0 < numbers[1] <= numbers[0]:
        return None
    content = {"kind": "square" if is_square else "central", "fraction": numbers[1] / numbers[0], "resize": resize}
    return EvalCrop.model_validate(content)


def normalise_of(mean: object, std: object) -> Normalise | None:
    """A normalisation from a file's numbers; None if these are not such numbers."""
    try:
        return Normalise.model_validate({"mean": mean, "std": std})
    except pydantic.ValidationError:
        return None
