"""The origin of the images of VTAB-1k's 19 tasks: dataset, slices, label rule, and where to get the data.

Slices are those of google-research/task_adaptation: the first 800 of the training part, the first 200 of the
validation part, and the whole test part, in the order of TensorFlow Datasets (TFDS). Where TFDS has no validation
split, the original cuts one off: a number such as 90 below is the cut's position, in percent of the split.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from data_tools.sources.tfrecord import LabelRule
from data_tools.vtab.labels import (
    clevr_count,
    clevr_distance,
    dsprites_location,
    dsprites_orientation,
    kitti_distance,
    stated,
)


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
    get: str  # where people get the data
    tars: str  # CLIP_benchmark's name for it, after `wds_vtab-`
    folders: tuple[str, ...] = ()  # names that a folder of the task may have, besides its own name
    rule: LabelRule = _STATED  # computes the label from an example's features
    class_names: tuple[str, ...] | None = None  # in order, where neither dataset nor folders give them; None otherwise
    is_binary: bool = False  # whether pixels are 0 and 1, and are stored as 0 and 255
    train: Slice = _TRAIN

    @property
    def tfds_name(self) -> str:
        return self.tfds.partition("/")[0]


_ALL_THREE = ("train", "validation", "test")
_TEST = Slice("test")
_VALIDATION = Slice("validation")
_CLEVR = ("clevr", "3", _ALL_THREE, Slice("train", 90), Slice("validation"))
_CLEVR_GET = "https://cs.stanford.edu/people/jcjohns/clevr (18 GB), or: tfds build clevr"
_DSPRITES = ("dsprites", "2", ("train",), Slice("train", 80, 90), Slice("train", 90))
_DSPRITES_GET = "https://github.com/google-deepmind/dsprites-dataset, or: tfds build dsprites"
_SMALLNORB = ("smallnorb", "2", ("train", "test"), Slice("test", 0, 50), Slice("test", 50))
_SMALLNORB_GET = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small, or: tfds build smallnorb"

ORIGINS: Mapping[str, Origin] = {
    "caltech101": Origin(
        "caltech101", "3", ("train", "test"), Slice("train", 90), _TEST,
        get="https://data.caltech.edu/records/mzrjq-6wc02, or: tfds build caltech101",
        tars="caltech101",
    ),
    "cifar100": Origin(
        "cifar100", "3", ("train", "test"), Slice("train", 90), _TEST,
        get="https://www.cs.toronto.edu/~kriz/cifar.html, or: tfds build cifar100",
        tars="cifar100", folders=("cifar",),
    ),
    "dtd": Origin(
        "dtd", "3", _ALL_THREE, _VALIDATION, _TEST,
        get="https://www.robots.ox.ac.uk/~vgg/data/dtd, or: tfds build dtd",
        tars="dtd",
    ),
    "flowers102": Origin(
        "oxford_flowers102", "2", _ALL_THREE, _VALIDATION, _TEST,
        get="https://www.robots.ox.ac.uk/~vgg/data/flowers/102, or: tfds build oxford_flowers102",
        tars="flowers",
    ),
    "pets": Origin(
        "oxford_iiit_pet", "3", ("train", "test"), Slice("train", 80), _TEST,
        get="https://www.robots.ox.ac.uk/~vgg/data/pets, or: tfds build oxford_iiit_pet",
        tars="pets",
    ),
    "sun397": Origin(
        "sun397/tfds", "4", _ALL_THREE, _VALIDATION, _TEST,
        get="https://vision.princeton.edu/projects/2010/SUN (37 GB), or: tfds build sun397/tfds",
        tars="sun397",
    ),
    "svhn": Origin(
        "svhn_cropped", "3", ("train", "test", "extra"), Slice("train", 90), _TEST,
        get="http://ufldl.stanford.edu/housenumbers, or: tfds build svhn_cropped",
        tars="svhn",
    ),
    "camelyon": Origin(
        "patch_camelyon", "2", _ALL_THREE, _VALIDATION, _TEST,
        get="https://github.com/basveeling/pcam, or: tfds build patch_camelyon",
        tars="pcam",
    ),
    "eurosat": Origin(
        "eurosat/rgb", "2", ("train",), Slice("train", 60, 80), Slice("train", 80),
        get="https://github.com/phelber/EuroSAT, or: tfds build eurosat/rgb",
        tars="eurosat",
    ),
    "resisc45": Origin(
        "resisc45", "3", ("train",), Slice("train", 60, 80), Slice("train", 80),
        get="NWPU-RESISC45.rar, by hand (https://www.tensorflow.org/datasets/catalog/resisc45 says from where), "
        "then: tfds build resisc45",
        tars="resisc45",
    ),
    "retinopathy": Origin(
        "diabetic_retinopathy_detection/btgraham-300", "3", ("sample", *_ALL_THREE), _VALIDATION, _TEST,
        get="https://www.kaggle.com/c/diabetic-retinopathy-detection/data, by hand and with an account, then: "
        "tfds build diabetic_retinopathy_detection/btgraham-300",
        tars="diabetic_retinopathy", folders=("diabetic_retinopathy",),
    ),
    "clevr_count": Origin(
        *_CLEVR, get=_CLEVR_GET, tars="clevr_count_all",
        rule=LabelRule(("objects/size",), clevr_count),
        class_names=tuple(f"{count} objects" for count in range(3, 11)),
    ),
    "clevr_dist": Origin(
        *_CLEVR, get=_CLEVR_GET, tars="clevr_closest_object_distance",
        rule=LabelRule(("objects/pixel_coords",), clevr_distance),
        class_names=("to 8", "to 8.5", "to 9", "to 9.5", "to 10", "over 10"),
    ),
    "dmlab": Origin(
        "dmlab", "2.0.1", _ALL_THREE, _VALIDATION, _TEST,
        get="https://github.com/google-research/task_adaptation (Dmlab), or: tfds build dmlab",
        tars="dmlab",
    ),
    "dspr_loc": Origin(
        *_DSPRITES, get=_DSPRITES_GET, tars="dsprites_label_x_position", folders=("dsprites_loc",),
        rule=LabelRule(("label_x_position",), dsprites_location),
        class_names=tuple(f"x {2 * bin} to {2 * bin + 1}" for bin in range(16)),
        is_binary=True,
    ),
    "dspr_ori": Origin(
        *_DSPRITES, get=_DSPRITES_GET, tars="dsprites_label_orientation", folders=("dsprites_ori",),
        rule=LabelRule(("label_orientation",), dsprites_orientation),
        class_names=tuple(f"orientation from {-(-5 * bin // 2)}" for bin in range(16)),
        is_binary=True,
    ),
    "kitti_dist": Origin(
        "kitti", "3.1.0", _ALL_THREE, _VALIDATION, _TEST,
        get="https://www.cvlibs.net/datasets/kitti (12 GB), or: tfds build kitti",
        tars="kitti_closest_vehicle_distance",
        rule=LabelRule(("objects/type", "objects/location"), kitti_distance),
        class_names=("to 8 m", "to 20 m", "over 20 m", "no vehicle"),
    ),
    "snorb_azim": Origin(
        *_SMALLNORB, get=_SMALLNORB_GET, tars="smallnorb_label_azimuth", folders=("smallnorb_azi",),
        rule=LabelRule(("label_azimuth",), stated),
        class_names=tuple(f"azimuth {20 * step}" for step in range(18)),
    ),
    "snorb_elev": Origin(
        *_SMALLNORB, get=_SMALLNORB_GET, tars="smallnorb_label_elevation", folders=("smallnorb_ele",),
        rule=LabelRule(("label_elevation",), stated),
        class_names=tuple(f"elevation {30 + 5 * step}" for step in range(9)),
    ),
}  # fmt: skip
"""By task; the tasks are those of `vitscale.ground.vtab`."""


def folder_names(task: str) -> tuple[str, ...]:
    """The names that a folder with the images of one task may have."""
    origin = ORIGINS[task]
    shared = sum(other.tfds == origin.tfds for other in ORIGINS.values()) > 1
    return tuple(dict.fromkeys((task, *origin.folders, *(() if shared else (origin.tfds_name,)))))
