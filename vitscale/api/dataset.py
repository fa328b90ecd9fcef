"""Datasets of shards for Python: sample by sample for torch's own tools, or at the loader's speed."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch.utils import data as torch_data

from vitscale.api.shown import facts
from vitscale.data.augmentation import EvalTransform
from vitscale.data.loader import Loader
from vitscale.data.order import EvalOrder, TrainOrder
from vitscale.data.settings import Reading
from vitscale.data.shards import Manifest
from vitscale.data.shards.cache import PinnedFile, ShardCache
from vitscale.data.shards.opening import OpenShard, keys_of, open_shard_file
from vitscale.data.views import view_kinds
from vitscale.ground.errors import DataError, MachineError, RecipeError, check_numbers
from vitscale.ground.page import fragment
from vitscale.ground.storage import is_url
from vitscale.models.weights.source import MOST_PIXELS
from vitscale.recipe import Cache, Data, Recipe
from vitscale.recipe.datasets import find_dataset_or_folder

_OPEN_SHARDS = 64


class Sample(NamedTuple):
    """One sample.

    Attributes:
        image: an RGB image of Pillow, or what the dataset's `transform` makes of it.
        label: the class, -1 for none; of several labels the main one.
        uid: its number, unique in the dataset.
        key: the image's name in the source; empty if it is unknown.
    """

    image: Any
    label: int
    uid: int
    key: str


class Dataset(torch_data.Dataset[Sample]):
    """A dataset of shards, as `convert` writes them: sample i is the i-th in stored order, which is shuffled.

    Works with `torch.utils.data.DataLoader` and its workers. Each image is compared with its checksum.

    Args:
        source: path or URL of the dataset, or a name that datasets.yaml or VITSCALE_DATA_ROOT gives a place.
        transform: what `image` of samples becomes, such as a model's `preprocess`.

    Raises `RecipeError` for a name without a place, `DataError` if there is no dataset or it is damaged, `StorageError`
    for a URL that does not answer.
    """

    def __init__(self, source: str | os.PathLike[str], transform: Callable[[Image.Image], Any] | None = None) -> None:
        self.manifest = Manifest.load(find_dataset_or_folder(os.fspath(source), None))
        self.transform = transform
        self._ends = np.cumsum([shard.num_selected for shard in self.manifest.shards], dtype=np.int64)
        self._shards: OrderedDict[int, _Shard] = OrderedDict()
        self._lock = Lock()

    @property
    def where(self) -> str:
        """Path or URL of its manifest."""
        return self.manifest.where if is_url(self.manifest.where) else str(Path(self.manifest.where).absolute())

    @property
    def class_names(self) -> list[str]:
        """The names of its classes; labels count them from 0."""
        return list(self.manifest.class_names)

    def __len__(self) -> int:
        return self.manifest.num_samples

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`, from the end if negative. Raises IndexError, `DataError` for damage, and `StorageError`."""
        at = range(len(self))[index]
        number = int(np.searchsorted(self._ends, at, side="right"))
        held = self._open(number)  # which keeps it open, whatever another thread does
        shard = held.shard
        slot = int(shard.slots[at - (int(self._ends[number - 1]) if number else 0)])
        image: Any = Image.fromarray(shard.pixels(slot))
        if self.transform is not None:
            image = self.transform(image)
        key = shard.keys[slot] if shard.keys is not None else ""
        return Sample(image, int(shard.file.label[slot]), int(shard.file.uid[slot]), key)

    def loader(
        self,
        batch: int | None = None,
        *,
        recipe: Recipe | None = None,
        training: bool = False,
        image_size: int | None = None,
        seed: int | None = None,
        start: int = 0,
        stop: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> Loader:
        """Batches of pixels at the loader's speed, uint8 (b, S, S, 3), with labels, uids and more: see `Batch`.

        Args:
            batch: samples of all ranks together; by default the recipe's, or 256.
            recipe: where crops, size, seed and the loader's operations are taken from; by default those of a recipe's
                defaults. Operations on floats (`random_erasing`, other packages') are training's own.
            training: in training's order, with its crops and flips, without end; otherwise evaluation's, once.
            image_size, seed: instead of the recipe's.
            start, stop: the batches, from 0, at which to start and before which to stop.
            rank, world: this rank, and how many share each batch.

        Raises `RecipeError` for a batch that cannot be, and `DataError` for a dataset without samples.
        """
        check_numbers(1, image_size=image_size)
        check_numbers(0, seed=seed, start=start, stop=stop)
        data = Data(train="") if recipe is None else recipe.data
        if image_size is not None:
            if image_size > MOST_PIXELS:
                raise RecipeError(f"image_size {image_size}: expected at most {MOST_PIXELS:,} pixels")
            data = data.model_copy(update={"image_size": image_size})
        if batch is None:
            batch = 256 if recipe is None else recipe.batch.global_size if training else recipe.evaluation.batch * world
        if not (batch > 0 and 0 <= rank < world and batch % world == 0):
            raise RecipeError(f"batches of {batch} for rank {rank} of {world}: expected a number that {world} divides")
        if not len(self):
            raise DataError(f"{self.where}: there are no samples")
        seed = seed if seed is not None else 0 if recipe is None else recipe.seed
        samples, reading = [shard.num_selected for shard in self.manifest.shards], Reading.of(data)
        return Loader(
            self.manifest,
            TrainOrder(samples, batch, seed, data.repeats) if training else EvalOrder(samples, batch),
            image_size=data.image_size,
            transform=EvalTransform.of(data.eval_crop),
            views=view_kinds(data) if training else (),
            rank=rank,
            world=world,
            seed=seed,
            reading=reading if training else reading.for_evaluation(),
            start_step=start,
            stop_step=stop,
        )

    def ffcv_loader(self, batch_size: int, pipelines: Mapping[str, Sequence[Any] | None], **options: Any) -> Any:
        """FFCV's own `Loader` of each shard, one after the other: iterable, with a length.

        Args:
            batch_size: the number of samples of a batch.
            pipelines: FFCV's pipelines of the fields `image`, `label` and `uid`; fields that it lacks are left out.
            options: further arguments of `ffcv.loader.Loader`, such as `order` and `num_workers`.

        Raises `MachineError` without FFCV, and `DataError` for a dataset that is not on this machine.
        """
        try:
            from ffcv.loader import Loader as Stock
        except ImportError as error:
            raise MachineError(f"ffcv_loader needs FFCV ({error}): pip install ffcv") from None
        if is_url(self.where):
            raise DataError(f"{self.where}: FFCV reads files of this machine only; copy the dataset here")
        loaders = []
        for index, entry in enumerate(self.manifest.shards):
            if entry.num_selected:
                # FFCV takes a pipeline's list apart, and its operations keep what they know of a file.
                fields = dict.fromkeys(self.manifest.fields) | deepcopy(dict(pipelines))
                chosen = {} if entry.select == "all" else {"indices": self.manifest.slots(index)}
                path = str(self.manifest.shard_path(index))
                loaders.append(Stock(path, batch_size=batch_size, pipelines=fields, **chosen, **options))
        return _OneAfterTheOther(loaders)

    def close(self) -> None:
        """Close the shards' files; they are opened again when a sample is asked for."""
        self._shards.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_shards", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _shards=OrderedDict(), _lock=Lock())  # each worker opens files of its own

    def __repr__(self) -> str:
        return f"Dataset({self.where!r}, {len(self):,} samples, {len(self.class_names):,} classes)"

    def _repr_html_(self) -> str:
        shards = self.manifest.shards
        about = {"dataset": self.where, "samples": len(self), "classes": ", ".join(self.class_names[:20])}
        return fragment([facts(about | {"shards": len(shards), "bytes": sum(shard.bytes for shard in shards)})])

    def _open(self, number: int) -> "_Shard":
        with self._lock:
            found = self._shards.get(number)
            if found is None:
                found = self._shards[number] = _Shard(self.manifest, number)
                while len(self._shards) > _OPEN_SHARDS:
                    self._shards.popitem(last=False)
        return found


class _Shard:
    """An open shard, closed once nothing refers to it."""

    def __init__(self, manifest: Manifest, number: int) -> None:
        self._pin: PinnedFile | None = None
        entry = manifest.shards[number]
        where = manifest.location(entry.path)
        if is_url(where):
            cache = Cache()
            self._pin = ShardCache(cache.folder() / "shards", int(cache.limit_gb * 10**9)).pin(where, entry)
        file = open_shard_file(manifest, number, Path(where) if self._pin is None else self._pin.path)
        self.shard = OpenShard(number, file, manifest.slots(number), keys_of(manifest, number))

    def __del__(self) -> None:
        if shard := getattr(self, "shard", None):
            shard.file.close()
        if self._pin is not None:
            self._pin.release()


class _OneAfterTheOther:
    def __init__(self, loaders: list[Any]) -> None:
        self.loaders = loaders

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            yield from loader

    def __len__(self) -> int:
        return sum(map(len, self.loaders))
