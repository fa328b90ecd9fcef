"""Nested random subsets of a dataset, such as the paper's 9M, 30M and 90M images of JFT-300M: manifests, not copies.

Conversion shuffles once, so the first samples of a dataset are a random subset of it, and a larger subset contains
every smaller one.
"""

from data_tools.views import ViewWriter
from vitscale.data.shards import Manifest, ShardEntry
from vitscale.ground.errors import DataError, RecipeError


def write_subset(dataset: str, out: str, count: int) -> Manifest:
    """Write a manifest of the first `count` samples of a dataset; it refers to the dataset's shards.

    Args:
        dataset: the dataset's folder, manifest file or URL.
        out: a new or empty folder; in the dataset's bucket if that is at a URL.
        count: number of samples.

    Raises:
        RecipeError: too many samples, or `out` cannot be used or has no relative path to the shards.
        DataError: the dataset is missing or damaged.
        StorageError: a URL does not answer.
    """
    whole = Manifest.load(dataset)
    if not 1 <= count <= whole.num_samples:
        raise RecipeError(f"a subset of {count:,} samples: {dataset} has {whole.num_samples:,}")
    try:
        with ViewWriter(whole, out) as view:
            shards: list[ShardEntry] = []
            left = count
            for index, entry in enumerate(whole.shards):
                if left == 0:
                    break
                slots = None
                if entry.num_selected > left:
                    slots = whole.slots(index)[:left]
                shards.append(view.entry(index, slots))
                left -= shards[-1].num_selected
            kept = {name: getattr(whole, name) for name in Manifest.model_fields}
            return view.save(Manifest(**kept | {"num_samples": count, "shards": tuple(shards)}))
    except OSError as error:
        raise DataError(f"OUT {out}: cannot be written ({error.strerror or error})") from error
