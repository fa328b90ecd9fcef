"""vitscale: pre-train Vision Transformers at scale, on your own hardware.

    import vitscale as vs

    model = vs.load("runs/photos")
    model.predict(["a.jpg", "b.jpg"])

docs/python.md shows what there is. Each name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vitscale.api.dataset import Dataset, Sample
    from vitscale.api.measuring import Inspection, evaluate, features, fewshot, inspect
    from vitscale.api.model import Model, Preprocess, list_models, load, predict
    from vitscale.api.run import Recipe, Run
    from vitscale.api.training import Training, convert, train
    from vitscale.ground import errors

_HOMES = {
    "dataset": ("Dataset", "Sample"),
    "measuring": ("Inspection", "evaluate", "features", "fewshot", "inspect"),
    "model": ("Model", "Preprocess", "list_models", "load", "predict"),
    "run": ("Recipe", "Run"),
    "training": ("Training", "convert", "train"),
}

__all__ = [
    "Dataset",
    "Inspection",
    "Model",
    "Preprocess",
    "Recipe",
    "Run",
    "Sample",
    "Training",
    "convert",
    "errors",
    "evaluate",
    "features",
    "fewshot",
    "inspect",
    "list_models",
    "load",
    "predict",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("vitscale.ground.errors")
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(f"vitscale.api.{home}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
