"""Labels that a record does not state, but that can be computed from its other features."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from vitscale.ground.errors import DataError


@dataclass(frozen=True)
class LabelRule:
    """Computes an example's label from its features.

    Attributes:
        features: the features that it needs, by TensorFlow Datasets' names: `label`, `objects/pixel_coords`.
        label: a function of their values, each a flat array, that returns the class number and raises ValueError if
            there is none. Must be a module-level function, because it is pickled for workers.
    """

    features: tuple[str, ...]
    label: Callable[..., int]

    def labels(self, values: Mapping[str, np.ndarray], spot: str) -> tuple[str, ...]:
        """The label of one example, as an Item has it. Raises DataError, which names `spot`."""
        missing = [name for name in self.features if name not in values]
        if missing:
            raise DataError(f"{spot}: no feature {', '.join(missing)}, from which the label follows")
        try:
            return (str(self.label(*(values[name] for name in self.features))),)
        except (ValueError, IndexError) as error:  # IndexError: per-object features that differ in length
            raise DataError(f"{spot}: {error}") from error
