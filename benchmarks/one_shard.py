"""The work of a conversion's worker, one shard in this process; shared by benchmarks."""

from collections import Counter
from pathlib import Path

import pyarrow as pa

from data_tools.dedup.against import NamedIndex
from data_tools.output import Output
from data_tools.plan import PLAN
from data_tools.shard_task import ShardReport, ShardTask
from data_tools.sources.folder import FolderSource
from data_tools.tasks import Progress
from vitscale.data.shards.images import ImageOptions


def convert_one_shard(
    folder: Path, out: Path, options: ImageOptions, dedup: tuple[NamedIndex, ...] = ()
) -> ShardReport:
    """All images of a folder as one shard of the dataset `out`."""
    source = FolderSource((str(folder),))
    items = list(source.items(0, Counter()))
    columns = {
        "uid": range(len(items)),
        "key": [item.key for item in items],
        "labels": [[0]] * len(items),
        "part": [0] * len(items),
        "content": [item.content for item in items],
    }
    task = ShardTask(
        index=0,
        split="",
        shard=0,
        rows=pa.RecordBatch.from_pydict(columns, PLAN),
        reader=source,
        output=Output.at(str(out), None),
        options=options,
        several_labels=False,
        dedup=dedup,
    )
    return task.run(Progress())  # that nobody watches
