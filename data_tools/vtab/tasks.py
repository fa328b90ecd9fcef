"""The origin of the images of VTAB-1k's 19 tasks: dataset, slices, label rule, and where to get the data.

Slices are those of google-research/task_adaptation: the first 800 of the training part, the first 200 of the
validation part, and the whole test part, in the order of TensorFlow Datasets (TFDS). Where TFDS has no validation
split, the original cuts one off: a number such as 90 below is the cut's position, in percent of the split. The label
rules are those of the same repository (data/clevr.py, kitti.py, dsprites.py, smallnorb.py), applied to features as TFDS
has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data_tools.sources.tfrecord import LabelRule

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


class Slice(NamedTuple):
    """Part of a split in its order: from `start` to `stop`, both percent of the split, rounded down to an image."""

    split: str
    start: int = 0
    stop: int = 100

    def rows(self, size: int, count: int | None = None) -> range:
        """The numbers of its images in a split of `size`; with `count` only the first of them."""
        first, end = size * self.start // 100, size * self.stop // 100
        return range(first, end if count is None else min(end, first + count))


class Takes(NamedTuple):
    """How many images the two small parts take."""

    train: int = 800
    val: int = 200


_TRAIN = Slice("train")
_STATED = LabelRule(("label",), stated)


@dataclass(frozen=True)
class Origin:
    """The origin of a task's images."""

    tfds: str  # name of the dataset in TFDS, with its configuration after a /
    version: str  # the version that the published order of images belongs to; `3` stands for any 3.x.y
    splits: tuple[str, ...]  # all splits in TFDS
    val: Slice  # the small parts take the first images of this and of `train`
    test: Slice
    place: str  # where people get the data
    tars: str = ""  # CLIP_benchmark's name for it, after `wds_vtab-`, if it is not the task's
    folders: tuple[str, ...] = ()  # names that a folder of the task may have, besides its own name
    rule: LabelRule = _STATED  # computes the label from an example's features
    class_names: tuple[str, ...] | None = None  # in order, where neither dataset nor folders give them; None otherwise
    needs_hand: bool = False  # whether TFDS cannot fetch the data itself
    is_binary: bool = False  # whether pixels are 0 and 1, and are stored as 0 and 255
    train: Slice = _TRAIN

    @property
    def tfds_name(self) -> str:
        return self.tfds.partition("/")[0]

    @property
    def get(self) -> str:
        """How people get the data."""
        return f"{self.place}, {'then' if self.needs_hand else 'or'}: tfds build {self.tfds}"


_ALL_THREE, _TRAIN_TEST = ("train", "validation", "test"), ("train", "test")
_TEST = Slice("test")
_VALIDATION = Slice("validation")
_CLEVR = (
    *("clevr", "3", _ALL_THREE, Slice("train", 90), Slice("validation")),
    "https://cs.stanford.edu/people/jcjohns/clevr (18 GB)",
)
_DSPRITES = (
    *("dsprites", "2", ("train",), Slice("train", 80, 90), Slice("train", 90)),
    "https://github.com/google-deepmind/dsprites-dataset",
)
_SMALLNORB = (
    *("smallnorb", "2", _TRAIN_TEST, Slice("test", 0, 50), Slice("test", 50)),
    "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small",
)

ORIGINS: Mapping[str, Origin] = {
    "caltech101": Origin(
        "caltech101", "3", _TRAIN_TEST, Slice("train", 90), _TEST, "https://data.caltech.edu/records/mzrjq-6wc02"
    ),
    "cifar100": Origin(
        "cifar100", "3", _TRAIN_TEST, Slice("train", 90), _TEST, "https://www.cs.toronto.edu/~kriz/cifar.html",
        folders=("cifar",),
    ),
    "dtd": Origin("dtd", "3", _ALL_THREE, _VALIDATION, _TEST, "https://www.robots.ox.ac.uk/~vgg/data/dtd"),
    "flowers102": Origin(
        "oxford_flowers102", "2", _ALL_THREE, _VALIDATION, _TEST, "https://www.robots.ox.ac.uk/~vgg/data/flowers/102",
        tars="flowers",
    ),
    "pets": Origin(
        "oxford_iiit_pet", "3", _TRAIN_TEST, Slice("train", 80), _TEST, "https://www.robots.ox.ac.uk/~vgg/data/pets"
    ),
    "sun397": Origin(
        "sun397/tfds", "4", _ALL_THREE, _VALIDATION, _TEST, "https://vision.princeton.edu/projects/2010/SUN (37 GB)"
    ),
    "svhn": Origin(
        "svhn_cropped", "3", ("train", "test", "extra"), Slice("train", 90), _TEST,
        "http://ufldl.stanford.edu/housenumbers",
    ),
    "camelyon": Origin(
        "patch_camelyon", "2", _ALL_THREE, _VALIDATION, _TEST, "https://github.com/basveeling/pcam", tars="pcam"
    ),
    "eurosat": Origin(
        "eurosat/rgb", "2", ("train",), Slice("train", 60, 80), Slice("train", 80),
        "https://github.com/phelber/EuroSAT",
    ),
    "resisc45": Origin(
        "resisc45", "3", ("train",), Slice("train", 60, 80), Slice("train", 80),
        "NWPU-RESISC45.rar, by hand (https://www.tensorflow.org/datasets/catalog/resisc45 says from where)",
        needs_hand=True,
    ),
    "retinopathy": Origin(
        "diabetic_retinopathy_detection/btgraham-300", "3", ("sample", *_ALL_THREE), _VALIDATION, _TEST,
        "https://www.kaggle.com/c/diabetic-retinopathy-detection/data, by hand and with an account",
        needs_hand=True, tars="diabetic_retinopathy", folders=("diabetic_retinopathy",),
    ),
    "clevr_count": Origin(
        *_CLEVR, tars="clevr_count_all", rule=LabelRule(("objects/size",), clevr_count),
        class_names=tuple(f"{count} objects" for count in range(3, 11)),
    ),
    "clevr_dist": Origin(
        *_CLEVR, tars="clevr_closest_object_distance", rule=LabelRule(("objects/pixel_coords",), clevr_distance),
        class_names=("to 8", "to 8.5", "to 9", "to 9.5", "to 10", "over 10"),
    ),
    "dmlab": Origin(
        "dmlab", "2.0.1", _ALL_THREE, _VALIDATION, _TEST, "https://github.com/google-research/task_adaptation (Dmlab)"
    ),
    "dspr_loc": Origin(
        *_DSPRITES, tars="dsprites_label_x_position", folders=("dsprites_loc",), is_binary=True,
        rule=LabelRule(("label_x_position",), dsprites_location),
        class_names=tuple(f"x {2 * bin} to {2 * bin + 1}" for bin in range(16)),
    ),
    "dspr_ori": Origin(
        *_DSPRITES, tars="dsprites_label_orientation", folders=("dsprites_ori",), is_binary=True,
        rule=LabelRule(("label_orientation",), dsprites_orientation),
        class_names=tuple(f"orientation from {-(-5 * bin // 2)}" for bin in range(16)),
    ),
    "kitti_dist": Origin(
        "kitti", "3.1.0", _ALL_THREE, _VALIDATION, _TEST, "https://www.cvlibs.net/datasets/kitti (12 GB)",
        tars="kitti_closest_vehicle_distance", rule=LabelRule(("objects/type", "objects/location"), kitti_distance),
        class_names=("to 8 m", "to 20 m", "over 20 m", "no vehicle"),
    ),
    "snorb_azim": Origin(
        *_SMALLNORB, tars="smallnorb_label_azimuth", folders=("smallnorb_azi",),
        rule=LabelRule(("label_azimuth",), stated), class_names=tuple(f"azimuth {20 * step}" for step in range(18)),
    ),
    "snorb_elev": Origin(
        *_SMALLNORB, tars="smallnorb_label_elevation", folders=("smallnorb_ele",),
        rule=LabelRule(("label_elevation",), stated), class_names=tuple(f"elevation {30 + 5 * n}" for n in range(9)),
    ),
}  # fmt: skip
"""By task; the tasks are those of `vitscale.ground.vtab`."""


def folder_names(task: str) -> tuple[str, ...]:
    """The names that a folder with the images of one task may have."""
    origin = ORIGINS[task]
    shared = sum(other.tfds == origin.tfds for other in ORIGINS.values()) > 1
    return tuple(dict.fromkeys((task, *origin.folders, *(() if shared else (origin.tfds_name,)))))
