"""ImageNet's thousand classes (ILSVRC 2012) by their WordNet ids, in the order of the outputs of published models."""

from functools import cache
from pathlib import Path


@cache
def imagenet_synsets() -> tuple[str, ...]:
    """The ids, such as n01440764, by class number; ImageNet's folders are named after them."""
    # The ids and their order are facts about the data set; this list of them was written from timm's (Apache-2.0).
    return tuple(Path(__file__).with_name("imagenet_synsets.txt").read_text(encoding="ascii").split())
