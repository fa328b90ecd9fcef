"""The samples of a dataset that de-duplication takes for copies of a few image files."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path


def copies_of(images: Sequence[Path], dataset: str) -> list[tuple[str, int, str]]:
    """The copies of images in a dataset, at a path or URL: the image's file, the copy's uid, the rule that found it.

    Raises as `build_index` and `find` do.
    """
    # Seconds of imports, which a question without --near does without.
    from data_tools.dedup.building import TestSource, build_index
    from data_tools.dedup.finding import find
    from data_tools.machine import Machine
    from data_tools.sources import SourceOptions, open_source
    from vitscale.data.shards.provenance import DECISIONS, DECISIONS_NAME, read_table

    with tempfile.TemporaryDirectory(prefix="vitscale-") as temporary:
        listed, index, found = (Path(temporary, name) for name in ("images.jsonl", "index", "found"))
        listed.write_text("".join(json.dumps({"path": str(image.absolute())}) + "\n" for image in images))
        source = open_source(str(listed), "list", SourceOptions(unlabelled=True))
        build_index([TestSource("asked", str(listed), source)], index, workers=1)
        find(dataset, [str(index)], str(found), Machine(None).runner(dataset))
        rows = read_table(found / DECISIONS_NAME, DECISIONS).to_pylist()
    return [(row["test_key"], row["train_uid"], row["tier"]) for row in rows if row["removed"]]
