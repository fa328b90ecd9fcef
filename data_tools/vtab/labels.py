"""The label rules of VTAB-1k, applied to features as TensorFlow Datasets has them.

They are those of google-research/task_adaptation (data/clevr.py, kitti.py, dsprites.py, smallnorb.py).
"""

import numpy as np

CLEVR_METRES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
KITTI_METRES = (-100.0, 8.0, 20.0, 999.0)
_FEWEST_OBJECTS = 3
_VEHICLES = 3  # types 0 to 2: car, van, truck
_NO_VEHICLE = 1000.0  # metres


def stated(label: np.ndarray) -> int:
    """The single label that an example states, (1,)."""
    if len(label) != 1:
        raise ValueError(f"{len(label)} labels; expected one")
    return int(label[0])


def clevr_count(sizes: np.ndarray) -> int:
    """The number of objects minus the minimum, three; from one size per object, (n,)."""
    return len(sizes) - _FEWEST_OBJECTS


def clevr_distance(pixel_coords: np.ndarray) -> int:
    """The class of the closest object's distance; from x, y and distance of each object, (3n,)."""
    distances = pixel_coords.reshape(-1, 3)[:, 2]
    if not len(distances):
        raise ValueError("no objects, so none is the closest")
    return last_exceeded(CLEVR_METRES, float(distances.min()))


def kitti_distance(types: np.ndarray, locations: np.ndarray) -> int:
    """The class of the closest car's, van's or truck's distance; from types (n,) and x, y, z in metres of each, (3n,).

    The last class is for pictures without any of them.
    """
    distances = locations.reshape(-1, 3)[types < _VEHICLES, 2]
    return last_exceeded(KITTI_METRES, float(min(distances, default=_NO_VEHICLE)))


def dsprites_location(label_x_position: np.ndarray) -> int:
    """32 positions from left to right in 16 bins."""
    return binned(stated(label_x_position), 32, 16)


def dsprites_orientation(label_orientation: np.ndarray) -> int:
    """40 orientations in 16 bins, alternately of three and two."""
    return binned(stated(label_orientation), 40, 16)


def last_exceeded(thresholds: tuple[float, ...], value: float) -> int:
    """The number of the last threshold that is strictly below a value."""
    exceeded = [number for number, threshold in enumerate(thresholds) if threshold < value]
    if not exceeded:
        raise ValueError(f"a distance of {value:g}; expected more than {thresholds[0]:g}")
    return exceeded[-1]


def binned(label: int, labels: int, bins: int) -> int:
    """The bin of a label when `labels` consecutive labels are divided into `bins` bins."""
    if not 0 <= label < labels:
        raise ValueError(f"label {label}; expected 0 to {labels - 1}")
    return int(label // (labels / bins))
