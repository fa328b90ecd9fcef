"""How many elements are sent, gathered or updated at a time: what training gives DeepSpeed, and what a plan counts."""

from vitscale.recipe import Recipe

MOST_UNDER_WAY = 8
"""The most buckets whose gradients are sent at one time with `parallelism.overlap`; they must be kept meanwhile."""

_PERSISTENCE_THRESHOLD = 100_000  # DeepSpeed's own default


def bucket_sizes(stage: int, exchanges: bool) -> dict[str, int]:
    """Bucket sizes in elements. They do not affect results; DeepSpeed's own defaults cost gigabytes per rank.

    A `deepspeed:` block may set others.

    Args:
        stage: of ZeRO, 0 to 3.
        exchanges: whether training/exchange.py sends, instead of DeepSpeed.
    """
    sizes = {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}
    if exchanges:
        sizes["reduce_bucket_size"] = 20_000_000  # a block of ViT-H: the last bucket is sent after all computing
    if stage == 3:
        # A block of ViT-H has 20 million parameters: a few blocks are held whole, and are updated at a time.
        sizes |= {
            "stage3_prefetch_bucket_size": 20_000_000,
            "stage3_max_live_parameters": 100_000_000,
            "stage3_max_reuse_distance": 100_000_000,
            "sub_group_size": 100_000_000,
        }
    return sizes


def elements_in_flight(recipe: Recipe) -> dict[str, int]:
    """The sizes of DeepSpeed's buckets and thresholds, in elements, as the recipe or else training sets them."""
    given = recipe.deepspeed.get("zero_optimization", {})
    sizes = bucket_sizes(recipe.parallelism.zero_stage, recipe.parallelism.exchanges)
    return sizes | {"stage3_param_persistence_threshold": _PERSISTENCE_THRESHOLD} | given
