"""Labels that a record does not state, but that follow from its other features."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from vitscale.errors import DataError


@dataclass(frozen=True)
class LabelRule:
    """A rule that gives an example its label.

    Attributes:
        features: that it needs, by the names that TensorFlow Datasets gives them: `label`, `objects/pixel_coords`.
        label: from the values of these, each a flat array, to the number of the class; raises ValueError where there
            is none. A function of a module, because it travels to workers.
    """

    features: tuple[str, ...]
    label: Callable[..., int]

    def labels(self, values: Mapping[str, np.ndarray], spot: str) -> tuple[str, ...]:
        """The label of one example as items have it. Raises DataError, which says where."""
        missing = [name for name in self.features if name not in values]
        if missing:
            raise DataError(f"{spot}: no feature {', '.join(missing)}, from which the label follows")
        try:
            return (str(self.label(*(values[name] for name in self.features))),)
        except (ValueError, IndexError) as error:  # IndexError: features of one object each that differ in number
            raise DataError(f"{spot}: {error}") from error
