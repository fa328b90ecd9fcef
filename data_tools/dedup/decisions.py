"""The decisions of a comparison with test sets, as rows of `dedup.parquet`."""

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from data_tools.dedup.match import Match
from data_tools.dedup.matching import Matcher
from data_tools.dedup.variants import variant_name
from vitscale.data.shards.provenance import DECISIONS


def decisions(matcher: Matcher, images: Iterable[tuple[int, str]], matches: Sequence[Sequence[Match]]) -> pa.Table:
    """The matches of some images, given as uid and key in the same order, as a table of schema DECISIONS."""
    rows: list[dict[str, Any]] = []
    for (uid, key), of_image in zip(images, matches, strict=True):
        for match in of_image:
            rows.append(
                {
                    "train_uid": uid,
                    "train_key": key,
                    "test_set": matcher.test_sets[match.test_set].name,
                    "test_key": match.key,
                    "tier": match.tier,
                    "distance": match.distance,
                    "correlation": match.correlation,
                    "cosine": match.cosine,
                    "variant": None if match.variant is None else variant_name(match.variant),
                    "removed": match.removed,
                }
            )
    return pa.Table.from_pylist(rows, DECISIONS)
