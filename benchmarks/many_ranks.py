"""A checkpoint of many ranks, written, verified and read by fewer: time, memory, and how they grow with the ranks.

    $ python benchmarks/many_ranks.py --ranks 256 512 1024 --readers 64

Every rank of ZeRO 3 saves a piece of every parameter and moment: as many fragments as ViT-H/14 has, of one element
each, so that nothing but their number counts. (Python shares the integers up to 256: the length of a larger fragment
takes 32 bytes more in a layout.) All ranks are threads of one process, which meet at a gather of values that become
JSON as between processes; what each would be sent is counted as ranks send it, every rank's value as long as the
longest. Seconds are those of the processor; bytes of one rank are those of Python's objects.
"""

import argparse
import gc
import json
import resource
import shutil
import tempfile
import threading
import time
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitscale.objectives import build_objective
from vitscale.recipe import load_recipe
from vitscale.runs.checkpoint import CheckpointIndex, CheckpointReader, CheckpointStore, Fragment
from vitscale.runs.checkpoint_index import index_text, parse_index
from vitscale.runs.names import step_folder

KINDS = ["master", "exp_avg", "exp_avg_sq"]


class Meeting:
    """The ranks of a world, as threads."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.sent = ranks, 0
        self._values: list[bytes] = [b""] * ranks
        self._barrier = threading.Barrier(ranks)

    def gather(self, rank: int, value: object) -> list[Any]:
        """As vitscale.ground.ranks.gather."""
        self._values[rank] = json.dumps(value).encode()
        self._barrier.wait()
        values = self._values[:]
        self._barrier.wait()
        if rank == 0:
            self.sent += self.ranks * max(map(len, values))
        return [json.loads(each) for each in values] if rank == 0 else [None] * self.ranks

    def share(self, rank: int, value: object) -> Any:
        """As vitscale.ground.ranks.from_rank_zero."""
        self._values[rank] = json.dumps(value).encode()
        self._barrier.wait()
        content = self._values[0]
        self._barrier.wait()
        if rank == 0:
            self.sent += len(content)
        return json.loads(content)

    def run(self, work: Any) -> None:
        """Call `work(rank)` on every rank."""
        threading.stack_size(1 << 20)
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--readers", type=int, default=64)
    parser.add_argument("--recipe", default="h14_jft")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    recipe = load_recipe(given.recipe)
    with torch.device("meta"):
        names = [name for name, _ in build_objective(recipe, 18_291).named_weights()]
    before: dict[str, float] = {}
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            found = measured(Path(folder), names, recipe.dump(), ranks, given.readers)
        if given.json:
            print(json.dumps(found))
        else:
            for key, value in found.items():
                growth = f"  x {value / before[key]:.2f}" if before.get(key) else ""
                print(f"{key:<44} {value:>14,.3f}{growth}")
            print()
        before = found


def measured(folder: Path, names: list[str], recipe: dict[str, Any], ranks: int, readers: int) -> dict[str, float]:
    """Of one checkpoint."""
    shapes = {name: [ranks] for name in names}
    index = CheckpointIndex(1, ranks, shapes, KINDS, 1, recipe, {}, {"vitscale": "0"})
    own = {kind: torch.ones(1) for kind in KINDS}
    writing, place = Meeting(ranks), folder / "checkpoints"

    def save(rank: int) -> None:
        store = CheckpointStore(
            place, rank=rank, gather=partial(writing.gather, rank), share=partial(writing.share, rank)
        )
        store.save(index, [Fragment(name, rank, own) for name in names])

    found: dict[str, float] = {"ranks": ranks, "fragments": ranks * len(names) * len(KINDS)}
    began = time.process_time()
    writing.run(save)
    found["saving, all ranks together, s"] = time.process_time() - began
    found["saving, sent to each rank, MB"] = writing.sent / 1e6
    text = (place / step_folder(1) / "index.json").read_bytes()
    found["index.json, MB"] = len(text) / 1e6
    began = time.process_time()
    written = parse_index(text, "index.json")
    index_text(written)
    found["index.json parsed and written, s"] = time.process_time() - began

    reading = Meeting(readers)
    kept: list[CheckpointReader] = []

    def verify(rank: int) -> None:
        if rank:  # the part of another rank: its own files, verified
            reading.share(rank, None)
            reading.gather(rank, None)
            own = {entry.path: layout_of(place, entry) for entry in written.files[rank::readers]}
            reading.gather(rank, {"result": own})
            return
        store = CheckpointStore(place, gather=partial(reading.gather, 0), share=partial(reading.share, 0))
        kept.append(store.open(1))

    began = time.process_time()
    reading.run(verify)
    found[f"verifying, all of {readers} ranks together, s"] = time.process_time() - began
    found["verifying, sent to each rank, MB"] = reading.sent / 1e6
    files = kept.pop()._files
    layouts = {entry.path: layout_of(place, entry) for entry in written.files}
    began = time.process_time()
    reader = CheckpointReader(files, written, layouts)
    found["finding the pieces, one rank, s"] = time.process_time() - began
    del layouts, reader
    gc.collect()
    tracemalloc.start()
    layouts = {entry.path: layout_of(place, entry) for entry in written.files}
    found["layouts, until the pieces are found, MB"] = tracemalloc.get_traced_memory()[0] / 1e6
    reader = CheckpointReader(files, written, layouts)
    found["layouts and pieces at most, MB"] = tracemalloc.get_traced_memory()[1] / 1e6
    del layouts
    gc.collect()
    found["pieces, kept by each rank, MB"] = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    share = ranks // readers
    began = time.process_time()
    for name in names:
        for kind in KINDS:
            assert len(reader.read(kind, name, 7 * share, share)) == share
    found[f"reading, one of {readers} ranks, s"] = time.process_time() - began
    began = time.process_time()
    for name in names:
        assert len(reader.read("master", name, 0, ranks)) == ranks
    found["reading all weights on one rank, s"] = time.process_time() - began
    found["this process, with all ranks, at most, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    shutil.rmtree(place)
    return found


def layout_of(place: Path, entry: Any) -> dict[str, int]:
    """Of a rank's file, verified."""
    from vitscale.runs.checkpoint.format import read_layout, verify_file

    path = place / step_folder(1) / entry.path
    verify_file(path, entry)
    return read_layout(path)


if __name__ == "__main__":
    main()
