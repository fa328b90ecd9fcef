"""The `data` and `batch` blocks of a recipe: the training data, how they are read, and how many an update sees."""

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from vitscale.ground.block import Block, has_default
from vitscale.ground.errors import RecipeError
from vitscale.ground.extensions import by_kind
from vitscale.ground.storage import is_url
from vitscale.recipe.image_operations import AnyOperation, ImageOperation

CACHE_VARIABLE = "VITSCALE_CACHE"
MICRO_MAX_ON_CPU = 128
"""What `batch.micro_max: auto` is on CPUs, whose memory is not what limits their speed."""

_BOXES = ("inception", "resized")
_MOST_VIEWS = 64
_Operations = list[
    Annotated[
        Annotated[SerializeAsAny[AnyOperation], Field(discriminator="kind")],
        by_kind(ImageOperation, "data.operations.N"),
    ]
]
_Channels = Annotated[list[Annotated[float, Field(ge=-1e3, le=1e3)]], Field(min_length=3, max_length=3)]


class Crop(Block):
    """Random crop for training.

    `inception` is the paper's: share of the area and aspect ratio width / height, both [low, high]. `resized` is
    torchvision's RandomResizedCrop with Pillow's bicubic filter, as self-supervised recipes use. `resize` is BiT's: the
    image is resized to a square, from which a square with `fraction` of its sides is cut (128 / 160 for small images).
    """

    _reports_all: ClassVar[bool] = True

    kind: Literal["inception", "resized", "resize"] = Field("inception", description="kind of crop")
    area: list[float] = Field([0.05, 1.0])
    """for inception and resized: lowest and highest share of the image's area"""
    aspect: list[float] = Field([3 / 4, 4 / 3])
    """for inception and resized: lowest and highest width / height"""
    fraction: float = Field(480 / 512, gt=0, le=1, description="for resize: side of the crop / side of the square")

    def _contradictions(self) -> Iterator[str]:
        for name, (bounds, ceiling) in {"area": (self.area, 1.0), "aspect": (self.aspect, float("inf"))}.items():
            if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] <= ceiling:
                limit = " <= 1" if ceiling == 1.0 else ""
                yield f"{name} must be [low, high] with 0 < low <= high{limit}, not {bounds}"
        for key, owners in (("area", _BOXES), ("aspect", _BOXES), ("fraction", ("resize",))):
            if self.kind not in owners and not has_default(self, key):
                yield f"{key} belongs to kind: {' and '.join(owners)}, and kind is {self.kind}"


class EvalCrop(Block):
    """The crop for evaluation: the central `fraction` of the short side (`central`), or of each side (`square`)."""

    kind: Literal["central", "square"] = Field("central", description="kind of crop")
    fraction: float = Field(224 / 256, gt=0, le=1, description="share of the side or sides that is kept")
    resize: Literal["area", "tf_bilinear", "pil_bilinear", "pil_bicubic"] = "area"
    """how the crop is resized to image_size: area: mean over areas; tf_bilinear: without antialiasing, as in TensorFlow
    and the authors' code; pil_bilinear, pil_bicubic: antialiased, as in Pillow. All but area decode at full size"""


class Normalise(Block):
    """How pixels become the model's input: (x - mean) / std, with x from 0 to 1, for red, green and blue separately.

    The default, [-1, 1], is the paper's. Weights of timm and transformers often use other values, and state them.
    """

    mean: _Channels = Field([0.5, 0.5, 0.5], description="subtracted from each channel")
    std: _Channels = Field([0.5, 0.5, 0.5], description="divisor of each channel; above 0")

    def _contradictions(self) -> Iterator[str]:
        if min(self.std) <= 0:
            yield f"std {self.std}: expected three numbers above 0"


class Cache(Block):
    """The cache on each machine for shards of datasets at a URL, and for other data kept between runs."""

    dir: str | None = Field(
        None, description=f"a folder on each machine; default: ${CACHE_VARIABLE} or ~/.cache/vitscale"
    )
    limit_gb: float = Field(100.0, gt=0, le=1e9)
    """limit in gigabytes (10**9) for the shards of all runs on a machine"""

    def folder(self) -> Path:
        """The absolute path of the cache on this machine; it need not exist. Raises `RecipeError`."""
        place = self.dir or os.environ.get(CACHE_VARIABLE)
        try:
            if place:
                return Path(place).expanduser().absolute()
            return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "vitscale"
        except RuntimeError as error:  # a container's user need not have a home
            raise RecipeError(f"data.cache.dir: {error} Set a folder with --set data.cache.dir=DIR") from None

    def _contradictions(self) -> Iterator[str]:
        if self.dir is not None and is_url(self.dir):
            yield f"dir {self.dir!r}: expected a folder of each machine, no URL"


class View(Block):
    """Views of each image that are drawn alike: several crops of it, each with randomness of its own."""

    name: str = Field(pattern="^[a-z][a-z0-9_]{0,31}$", description="what it is called, such as global or local")
    count: int = Field(1, ge=1, le=_MOST_VIEWS, description="how many views of each image")
    size: int | None = Field(None, ge=1, le=8192, description="their side in pixels; default: data.image_size")
    crop: Crop = Crop(kind="resized")
    flip: float = Field(0.5, ge=0, le=1, description="probability of a horizontal flip")
    operations: _Operations = Field([], description="operations on them after crop and flip, as data.operations")

    def _contradictions(self) -> Iterator[str]:
        return _misplaced(self.operations)


class Data(Block):
    """The training data and how it is read."""

    _later_keys: ClassVar[tuple[str, ...]] = ("views",)

    train: str = Field(description="a dataset: NAME or NAME/SPLIT under data.root, a path (/, ./, ../, ~), or a URL")
    root: str | None = None
    """the folder or URL that holds the datasets; default: from datasets.yaml or $VITSCALE_DATA_ROOT"""
    image_size: int = Field(224, ge=1, le=8192, description="side of the model's input in pixels")
    crop: Crop = Crop()
    flip: float = Field(0.5, ge=0, le=1, description="probability of a horizontal flip")
    repeats: int = Field(1, ge=1, le=1024)
    """views of each sample in a global batch, which then has fewer samples by this factor (repeated augmentation);
    epochs still count images"""
    operations: _Operations = Field([])
    """operations on training images after crop and flip, in this order: first those of the loader (ours on uint8
    pixels), then, on the device, other packages' operations on uint8 pixels, then all on floats"""
    views: list[View] = Field([])
    """several views of each image from one decoding, for objectives that compare them; then crop, flip and operations
    are theirs. Empty: one view, as those keys say"""
    normalise: Normalise = Normalise()
    eval_crop: EvalCrop = EvalCrop()
    threads: int | None = Field(None, ge=1, le=256)
    """decoding threads per rank; default: 2; with a GPU, the rank's share of the cores minus one, at most 16"""
    prefetch: int = Field(2, ge=1, le=64, description="number of batches decoded ahead")
    dct_scaling: bool = False
    """decode at 1/2, 1/4 or 1/8 if that is still at least image_size; faster, but gives other pixels"""
    verify_shards: bool = Field(True, description="compare each shard with its digest when a machine first opens it")
    check_rate: float = Field(1.0, ge=0, le=1, description="share of image reads whose checksum is compared")
    bad_samples: Literal["error", "substitute", "mask"] = "error"
    """a damaged image ends the run (error), is replaced by another of its shard (substitute), or has no weight
    (mask)"""
    stall_s: float = Field(300.0, gt=0, description="seconds after which a read that has not returned ends the run")
    cache: Cache = Cache()

    def _contradictions(self) -> Iterator[str]:
        yield from _misplaced(self.operations)
        if not self.views:
            return
        names = [view.name for view in self.views]
        if twice := next((name for name in names if names.count(name) > 1), None):
            yield f"views: two are called {twice}"
        if (total := sum(view.count for view in self.views)) > _MOST_VIEWS:
            yield f"views: {total} of each image; expected at most {_MOST_VIEWS}"
        if self.views[0].size not in (None, self.image_size):
            yield (
                f"views: the first, {names[0]}, has {self.views[0].size} pixels, and image_size is {self.image_size}: "
                f"it is the first view's; leave its size out"
            )
        for key in ("crop", "flip", "operations"):
            if not has_default(self, key):
                yield f"{key} describes a single view, and there are views: give it to each of them"
        if self.dct_scaling:
            yield "dct_scaling: true goes with a single view, and there are views"

    def training_views(self) -> list[tuple[View, int]]:
        """The kinds of views in training, each with its side in pixels."""
        views = self.views or [View(name="image", crop=self.crop, flip=self.flip, operations=self.operations)]
        return [(view, view.size or self.image_size) for view in views]


def _misplaced(operations: Sequence[ImageOperation]) -> Iterator[str]:
    places = ("in the loader", "on the device's uint8 pixels", "on floats")
    for operation, next_one in itertools.pairwise(operations):
        if operation.place > next_one.place:
            yield (
                f"operations: {next_one.kind} works {places[next_one.place]}, and {operation.kind} before it "
                f"{places[operation.place]}; put it before all of those"
            )


class Batch(Block):
    """The global batch is the experiment; micro-batch and accumulation follow from it and the world size."""

    # `global` is a Python keyword, hence the alias.
    global_size: Annotated[int, Field(ge=1, le=2**31, alias="global", description="images per update, over all ranks")]
    micro_max: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """largest micro-batch a rank computes at once; auto: what fits into a CUDA device by the plan, at most 1024, and
    128 on CPUs, chosen once when the run begins"""

    def split(self, world_size: int) -> tuple[int, int]:
        """(micro-batch, accumulation steps) of each rank; their product times the world size is the global batch.

        Where `micro_max` is `auto` it counts as on CPUs: see training/beginning/memory.py.
        """
        per_rank, rest = divmod(self.global_size, world_size)
        if rest:
            raise RecipeError(
                f"batch.global {self.global_size} does not divide by the {world_size} ranks of this launch; "
                f"use a world size that divides it"
            )
        most = MICRO_MAX_ON_CPU if self.micro_max == "auto" else self.micro_max
        micro = max(size for size in range(1, min(per_rank, most) + 1) if per_rank % size == 0)
        return micro, per_rank // micro
