"""What tests of the converter share."""

import pickle
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner, Result

from data_tools import machine
from data_tools.dedup.against import open_matcher
from data_tools.sources.source import Item
from data_tools.tasks import run_inline
from vitscale.cli.convert import app
from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import open_shard


def contents(dataset: Path) -> dict[str, bytes]:
    """Every file of a finished dataset, by path; but for its log, the one that may say when and where."""
    files = [path for path in dataset.rglob("*") if path.is_file()]
    assert not [path for path in files if any(part.startswith(".") for part in path.relative_to(dataset).parts)]
    return {str(path.relative_to(dataset)): path.read_bytes() for path in files if path.name != "convert.log.jsonl"}


def items_of(source, ignored: Counter[str] | None = None) -> list[Item]:
    """Items with the bytes of their images, read as a conversion does: by a source that has travelled to a worker."""
    source, ignored = pickle.loads(pickle.dumps(source)), Counter() if ignored is None else ignored
    found = [(part, item) for part in range(len(source.parts)) for item in source.items(part, ignored)]
    return [item if source.streams else item._replace(content=source.read(part, item.content)) for part, item in found]


class Sample(NamedTuple):
    key: str | None
    labels: list[int]
    image: bytes


def samples_of(dataset: Manifest | Path) -> dict[int, Sample]:
    """What a dataset selects, by uid, in the order of shards."""
    manifest, found = dataset if isinstance(dataset, Manifest) else Manifest.load(dataset), {}
    for index in range(len(manifest.shards)):
        with open_shard(manifest, index) as shard:
            for slot in shard.slots.tolist():
                key = shard.keys and shard.keys[slot]
                found[int(shard.file.uid[slot])] = Sample(key, shard.labels(slot), bytes(shard.image(slot)))
    assert len(found) == manifest.num_samples
    return found


def uids(dataset: Manifest | Path) -> list[int]:
    return list(samples_of(dataset))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "vitscale", "convert", *map(str, arguments)]


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, **options)


def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
    """A conversion in a process, and a process group, of its own."""
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command(*arguments), **piped, **options)


def convert_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have conversions to a folder run in this process, by the engine for `memory://`: another takes seconds to start.

    Tasks travel as they would to another process.
    """

    def sent(tasks):
        return (pickle.loads(pickle.dumps(task)) for task in tasks)

    monkeypatch.setattr(machine, "run_in_processes", lambda tasks, workers, tick: run_inline(sent(tasks), tick))


def run_here(*arguments: object) -> Result:
    """`vitscale-convert` in this process alone, as if it were one of its own."""
    open_matcher.cache_clear()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.MonkeyPatch.context() as patch:
            convert_here(patch)
            return CliRunner().invoke(app, list(map(str, arguments)))
    finally:
        signal.signal(signal.SIGTERM, before)
