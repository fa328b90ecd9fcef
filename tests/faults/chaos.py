"""A run under random faults, compared to the last bit with the same run left in peace.

    python tests/faults/chaos.py --minutes 30 --ranks 2 --seed 1 --out DIR [--objective masked_patches] [--json]

What is trained follows from the seed: a small model with dropout, accumulation, averaged weights and some ZeRO stage.
Ranks and the launch are killed, stopped and told to end, checkpoints and data are damaged, the disk is filled; the
launch is repeated until the run is done. Then a table says what was done to it, and the exit code is 1 if a single
value of any step or a bit of the final checkpoint differs from the undisturbed run's, if nothing was said of a fault,
or if a process ended as it should not have.
"""

import argparse
import ctypes
import json
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# The ranks share this machine whatever it has: no rank gets a device.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.append(str(Path(__file__).parents[1]))  # as pytest has it

from processes import is_alive
from small_files import flip
from watched_runs import Process, Run, differences, impatient_launch, launch, write_recipe

from vitscale.data.shards import ShardFile
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.ground.errors import CheckpointError, DataError, NonFiniteError, PeerLostError, PreemptedError

ENDINGS = ("kill rank", "stop rank", "kill launch", "end launch", "damage data")
"""What makes ranks start again."""
DAMAGES = ("flip checkpoint", "truncate checkpoint", "remove checkpoint file", "fill disk")
"""What may come together with an ending."""

_PILOT_STEPS = 60
_LEAST_STEPS = 400  # enough for a fault of each kind
_CHECKPOINT_SECONDS = 1.0  # of training between two
_DURING_START_UP = 0.15  # share of endings
_DISK_MIB = 256
_FULL = "WITHOUT THIS CHECKPOINT|is not saved|Make room"  # in training, at its end, at the start
_NEW_MOUNT_NAMESPACE = 0x00020000  # CLONE_NEWNS
_LOOK_EVERY_SECONDS = 0.02
_NEVER_SECONDS = 3600.0


@dataclass
class Fault:
    """One that was injected.

    Attributes:
        at: when, on the monotonic clock.
        sign: the pattern of what has to be said of it.
        log_bytes: what had been written before.
        step: the last one trained before it took effect; None until it has.
        lost_s: until the step after that one was trained; None while it was not.
    """

    kind: str
    at: float
    sign: str | None
    log_bytes: int
    step: int | None = None
    lost_s: float | None = None


class Chaos:
    """The disturbed run, launched as often as it takes.

    Attributes:
        problems: what should not have happened, in words.
        steps_twice: those trained again after a fault.
    """

    def __init__(self, run: Run, ranks: int, shards: Path, log: Path, rng: random.Random, *, fills_disk: bool) -> None:
        self.faults: list[Fault] = []
        self.problems: list[str] = []
        self.steps_twice = 0
        self.launches = 0
        self._run, self._ranks, self._shards, self._log, self._rng = run, ranks, shards, log, rng
        self._damages = DAMAGES if fills_disk else DAMAGES[:-1]
        self._damaged: set[tuple[str, int, int]] = set()
        self._highest = 0  # step, before the last fault
        self._process: Process

    # ---- The loop ----------------------------------------------------------------------------------------------------

    def disturb(self, seconds: float, up_s: float, start_up_s: float, after_each: Callable[[], None]) -> None:
        """Train to the end.

        Faults come for so many seconds, and until there was one of each kind; each some time after a start, `up_s` on
        average.
        """
        until = time.monotonic() + seconds
        plan = self._plan()
        self._start()
        try:
            while True:
                if time.monotonic() > until and self._missing() == []:
                    self._wait(lambda: False)
                elif self._reach_the_moment(up_s, start_up_s):
                    self._inject(*next(plan))
                    after_each()
                if self._process.code() is not None:
                    self._judge_end()
                    if self._run.is_done():
                        break
                    self._start()
        finally:
            self._process.close()
        self._note_progress()

    def unnoticed(self) -> list[Fault]:
        """Faults of which nothing was said."""
        return [
            fault
            for fault in self.faults
            if fault.sign is not None and not re.search(fault.sign, self._text(fault.log_bytes))
        ]

    def _missing(self) -> list[str]:
        """Kinds of which there was no fault."""
        return sorted({*ENDINGS, *self._damages} - {fault.kind for fault in self.faults})

    def _plan(self) -> Iterator[tuple[str, str | None]]:
        """Endings and what comes together with them: first all kinds of both, then any."""
        while missing := self._missing():
            endings = [kind for kind in missing if kind in ENDINGS] or ENDINGS
            damages = [kind for kind in missing if kind in DAMAGES] or [None]
            yield self._rng.choice(endings), self._rng.choice(damages)
        while True:
            yield self._rng.choice(ENDINGS), self._rng.choice([*self._damages, *[None] * len(self._damages)])

    def _start(self) -> None:
        self.launches += 1
        self._awaited: set[int] = {PeerLostError.exit_code}  # restarts in a row without a new checkpoint are limited
        self._process = Process(impatient_launch(self._run, self._ranks), self._log)

    def _reach_the_moment(self, up_s: float, start_up_s: float) -> bool:
        """Wait until the next fault is due; False where the launch ends before."""
        if self.faults and self._rng.random() < _DURING_START_UP:
            delay = self._rng.uniform(0, start_up_s)
        else:
            before = _changed_at(self._run.metrics)
            if not self._wait(lambda: _changed_at(self._run.metrics) != before):
                return False
            self._note_resumption()
            delay = self._rng.uniform(0.3, 2 * up_s)
        moment = time.monotonic() + delay
        return self._wait(lambda: time.monotonic() > moment)

    def _wait(self, is_so: Callable[[], Any]) -> bool:
        """Whether it becomes so before the launch ends."""
        deadline = time.monotonic() + _NEVER_SECONDS
        while not is_so():
            self._note_progress()
            if self._process.code() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing has happened for {_NEVER_SECONDS:.0f} s; see {self._log}")
            time.sleep(_LOOK_EVERY_SECONDS)
        return True

    def _judge_end(self) -> None:
        code = self._process.end(10)
        if code not in self._awaited and not (code == 0 and self._run.is_done()):
            self.problems.append(f"launch {self.launches} ended with {code}; expected {sorted(self._awaited)}")

    # ---- Faults ------------------------------------------------------------------------------------------------------

    def _inject(self, ending: str, damage: str | None) -> None:
        """Bring about an ending, wait until it has come, and damage what is read next."""
        if not self._process.ranks():
            return  # between two attempts
        if damage == "fill disk":
            with self._full_disk():
                self._end(ending)
        else:
            self._end(ending)
            if damage is not None:
                self._damage_checkpoint(damage)
        for fault in self.faults:
            if fault.step is None:
                fault.step = self._run.step()

    def _end(self, ending: str) -> None:
        ranks = self._process.ranks()
        if not ranks:
            return
        rank = self._rng.choice(sorted(ranks))
        who = rf"rank {rank} \(pid {ranks[rank]}\) "
        if ending == "kill rank" or (ending == "stop rank" and not self._is_training()):
            self._note("kill rank", who + "was killed by SIGKILL")
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(ranks[rank], signal.SIGKILL)
        elif ending == "stop rank":
            self._note(ending, who + ".*stopped, T")
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(ranks[rank], signal.SIGSTOP)
        elif ending == "kill launch":
            self._note(ending, None)
            self._await(-signal.SIGKILL)
            self._process.signal(signal.SIGKILL)
        elif ending == "end launch":
            self._note(ending, "SIGTERM")
            self._await(PreemptedError.exit_code)
            self._process.signal(signal.SIGTERM)
        else:
            path, place = somewhere_in(self._shards, self._rng)
            self._note(ending, f"{re.escape(path.name)}: .*(do not match their checksum|damaged)")
            self._await(DataError.exit_code)
            flip(path, place)
            self._wait(lambda: False)
            flip(path, place)
        self._wait(lambda: not any(is_alive(pid) for pid in ranks.values()))
        if ending in ("kill launch", "end launch"):
            self._wait(lambda: False)

    def _is_training(self) -> bool:
        """A rank that is stopped before it has met the others keeps them waiting for minutes."""
        return self._run.step() > 0 and time.time() - self._run.metrics.stat().st_mtime < 1

    def _note(self, kind: str, sign: str | None) -> None:
        self.faults.append(Fault(kind, time.monotonic(), sign, self._log.stat().st_size))

    def _await(self, code: int) -> None:
        """The launch may end with this code."""
        self._awaited.add(code)

    @contextmanager
    def _full_disk(self) -> Iterator[None]:
        """Nothing can be saved from before, until a save has failed, to after what happens meanwhile."""
        self._note("fill disk", _FULL)
        self._await(CheckpointError.exit_code)  # of the last step
        begins_at = self._log.stat().st_size
        filler = self._run.checkpoints / "filler"
        try:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))
            self._wait(lambda: re.search(_FULL, self._text(begins_at)))
            yield
        finally:
            filler.unlink()

    def _damage_checkpoint(self, damage: str) -> None:
        """The newest one, where it is intact and an older one is, too."""
        folders = sorted(self._run.checkpoints.glob("step-*"))
        intact = [folder for folder in folders if _identity(folder) not in self._damaged]
        if len(intact) < 2 or intact[-1] != folders[-1]:
            return
        newest = intact[-1]
        file = self._rng.choice(sorted(newest.glob("*.safetensors")))
        self._note(damage, f"checkpoint of step {int(newest.name[5:])} is unusable")
        if damage == "flip checkpoint":
            flip(file, self._rng.randrange(file.stat().st_size))
        elif damage == "truncate checkpoint":
            os.truncate(file, self._rng.randrange(file.stat().st_size))
        else:
            self._rng.choice([file, newest / "index.json"]).unlink()
        self._damaged.add(_identity(newest))

    # ---- What became of it -------------------------------------------------------------------------------------------

    def _text(self, after: int = 0) -> str:
        return self._log.read_bytes()[after:].decode(errors="replace")

    def _note_progress(self) -> None:
        step = self._run.step()
        self._highest = max(self._highest, step)
        for fault in self.faults:
            if fault.step is not None and fault.lost_s is None and (step > fault.step or self._run.is_done()):
                fault.lost_s = time.monotonic() - fault.at

    def _note_resumption(self) -> None:
        found = re.findall(r"(?:resumed from \S+ at|it begins again at) step ([\d,]+)", self._text())
        if found and self.faults:
            step = int(found[-1].replace(",", ""))
            self.steps_twice += max(0, self._highest - step)
            self._highest = step


# ---- The whole program -----------------------------------------------------------------------------------------------


# objective -> what evaluates it, and what selects a checkpoint
_JUDGED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "classification": ({"validation": "test"}, {"metric": "validation/loss", "mode": "min"}),
    "masked_patches": (
        {"fewshot": {"tasks": [{"name": "small", "train": "train", "test": "test"}], "shots": [5]}},
        {"metric": "fewshot/small/5shot", "mode": "max"},
    ),
    "dino": ({"knn": {"train": "train", "test": "test", "k": [5]}}, {"metric": "knn/5nn", "mode": "max"}),
}
# objective -> what else its recipe has
_BESIDE: dict[str, dict[str, Any]] = {
    "dino": {
        "data": {"views": [{"name": "global", "count": 2}, {"name": "local", "count": 2, "size": 16}]},
        "objective": {"kind": "dino", "group": 2, "prototypes": 64, "hidden": 32, "bottleneck": 16},
    }
}


def choose(rng: random.Random, objective: str, ranks: int, every: int) -> dict[str, Any]:
    """Blocks of the recipe of a seed, which saves after `every` steps."""
    evaluation, selection = _JUDGED[objective]
    return {
        **{"batch": {"global": 8 * ranks, "micro_max": rng.choice([2, 4])}, "precision": rng.choice(["bf16", "fp32"])},
        "parallelism": {"zero_stage": rng.randrange(4), "activation_checkpointing": rng.choice([0, 1])},
        "checkpoint": {
            "every": {"steps": every},
            "keep": 3,
            "background": rng.random() < 0.7,
            "max_failures": 1000,  # the disk may stay full for long
        },
        **{"objective": {"kind": objective}, "evaluation": {**evaluation, "every": {"steps": 3 * every}, "batch": 16}},
        **{"selection": selection, "check": {"step_timeout_s": 60.0, "replicas_every": 5 * every}},
        "seed": rng.randrange(1000),
        **_BESIDE.get(objective, {}),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Train under random faults; compare with the undisturbed run.")
    parser.add_argument("--minutes", type=float, default=30, help="of faults; the rest takes about half as much again")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="a folder that is new or empty")
    parser.add_argument("--objective", choices=_JUDGED, default="classification", help="what is learned")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out {options.out} is not empty")
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _leave)
    report = examine(options, options.out.resolve())
    print(json.dumps(report) if options.json else in_words(report))
    sys.exit(1 if report["problems"] else 0)


def examine(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Pilot, undisturbed run, disturbed run, comparison: what `main` prints."""
    minutes, ranks, seed = options.minutes, options.ranks, options.seed

    def say(message: str) -> None:
        if not options.json:
            print(message, flush=True)

    os.environ["VITSCALE_CACHE"] = str(out / "cache")  # what is remembered of shards is not for other runs
    rng = random.Random(seed)
    data = out / "data"
    write_generated_dataset(data / "train", [64] * 4, seed=1)
    write_generated_dataset(data / "test", [96], seed=2)
    state = rng.getstate()

    def prepare(name: str, steps: int, every: int) -> Run:
        rng.setstate(state)
        blocks = choose(rng, options.objective, ranks, every) | {
            "schedule": {"duration": {"steps": steps}, "warmup": {"steps": 10}}
        }
        return Run(write_recipe(out / "recipe.yaml", data, **blocks), out / name)

    pilot = prepare("pilot", 10 * _PILOT_STEPS, _PILOT_STEPS // 3)
    start_up_s, pace_s = _measure(pilot, ranks, out / "pilot.log")
    up_s = min(2.5, 1 + minutes)
    every = max(2, round(_CHECKPOINT_SECONDS / pace_s))
    rounds = 60 * minutes / (start_up_s + up_s + 3)  # and what noticing costs
    steps = max(_LEAST_STEPS, int(rounds * up_s / pace_s))
    run = prepare("undisturbed", steps, every)
    say(f"seed {seed}: {steps:,} steps of {1000 * pace_s:.0f} ms, saved every {every}, {start_up_s:.0f} s to start")

    began = time.monotonic()
    with Process(launch(run, ranks=ranks), out / "undisturbed.log") as process:
        code = process.end(_NEVER_SECONDS)
        assert code == 0, f"the undisturbed run ended with {code}:\n{process.text()}"
    undisturbed_s = time.monotonic() - began
    say(f"undisturbed: {undisturbed_s:.0f} s")

    disturbed = Run(run.recipe, out / "disturbed")
    disturbed.checkpoints.mkdir(parents=True)
    has_disk = small_disk(disturbed.checkpoints)
    if not has_disk:
        say("no disk is filled: that needs to mount one, as root")
    chaos = Chaos(disturbed, ranks, data / "train", out / "disturbed.log", rng, fills_disk=has_disk)
    expected = {_key(line): line for line in run.curve()}
    differing: set[str] = set()

    def compare() -> None:
        differing.update(_key(line) for line in disturbed.curve() if line != expected.get(_key(line)))

    began = time.monotonic()
    chaos.disturb(60 * minutes, up_s, start_up_s, compare)
    disturbed_s = time.monotonic() - began

    compare()
    problems = chaos.problems
    if differing:
        problems.append(f"{len(differing)} lines of metrics differ, such as {sorted(differing)[:5]}")
    if [_key(line) for line in disturbed.curve()] != [_key(line) for line in run.curve()]:
        problems.append("not the same lines of metrics in the same order")
    state_differs = differences(disturbed.state(steps), run.state(steps))
    if state_differs:
        problems.append(f"the final checkpoints differ in {len(state_differs)} tensors, such as {state_differs[:3]}")
    unnoticed = chaos.unnoticed()
    problems += [f"nothing was said of: {fault.kind} ({fault.sign})" for fault in unnoticed]
    problems += [f"a {event['what']}" for event in disturbed.events("rank ended") if event["returncode"] in _BAD_ENDS]
    if problems and has_disk:
        shutil.copytree(disturbed.checkpoints, out / "disturbed-checkpoints")  # the disk goes with this process

    def row(kind: str) -> dict[str, Any]:
        faults = [fault for fault in chaos.faults if fault.kind == kind]
        lost = [fault.lost_s for fault in faults if fault.lost_s is not None]
        return {
            "injected": len(faults),
            "noticed": sum(fault not in unnoticed for fault in faults),
            "recovered": len(lost),
            "median_lost_s": round(statistics.median(lost), 1) if lost else None,
        }

    return {
        **{"seed": seed, "objective": options.objective, "ranks": ranks, "steps": steps},
        **{"faults": {kind: row(kind) for kind in (*ENDINGS, *DAMAGES)}, "launches": chaos.launches},
        **{"attempts": len(disturbed.events("started")), "steps_twice": chaos.steps_twice},
        **{"undisturbed_s": round(undisturbed_s, 1), "disturbed_s": round(disturbed_s, 1)},
        **{"lines_compared": len(expected), "fills_disk": has_disk, "problems": problems},
    }


_BAD_ENDS = (1, 2, NonFiniteError.exit_code)


def in_words(report: dict[str, Any]) -> str:
    """The table."""
    lines = [f"{'fault':<24}{'injected':>10}{'noticed':>10}{'recovered':>10}{'s lost (median)':>17}"]
    for kind, row in report["faults"].items():
        lost = "-" if row["median_lost_s"] is None else f"{row['median_lost_s']:.1f}"
        lines.append(f"{kind:<24}{row['injected']:>10}{row['noticed']:>10}{row['recovered']:>10}{lost:>17}")
    total = {key: sum(row[key] for row in report["faults"].values()) for key in ("injected", "noticed", "recovered")}
    lost_s = report["disturbed_s"] - report["undisturbed_s"]
    lines += [
        f"{'all':<24}{total['injected']:>10}{total['noticed']:>10}{total['recovered']:>10}{lost_s:>10.0f} in all",
        f"{report['launches']} launches, {report['attempts']} attempts, {report['steps']:,} steps, "
        f"{report['steps_twice']:,} of them done twice; {report['disturbed_s']:.0f} s instead of "
        f"{report['undisturbed_s']:.0f} s",
        *(f"PROBLEM: {problem}" for problem in report["problems"]),
        "differs from the undisturbed run, or worse"
        if report["problems"]
        else f"identical to the undisturbed run: {report['lines_compared']:,} lines of metrics, the final checkpoint",
    ]
    return "\n".join(lines)


def small_disk(folder: Path) -> bool:
    """Mount a small file system there, seen by this process and its children alone and gone with them; False if not."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNT_NAMESPACE) != 0:
        return False
    commands = (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(folder)],
    )
    return all(subprocess.run(command, capture_output=True).returncode == 0 for command in commands)


def somewhere_in(dataset: Path, rng: random.Random) -> tuple[Path, int]:
    """A shard of a dataset, and the place of a byte of one of its pictures."""
    path = rng.choice(sorted(dataset.glob("*.beton")))
    with ShardFile(path) as shard:
        slot = rng.randrange(len(shard.offset))
        return path, int(shard.offset[slot]) + rng.randrange(int(shard.size[slot]))


def _measure(run: Run, ranks: int, log: Path) -> tuple[float, float]:
    """Seconds that a launch takes to its first step, and seconds a step, with this machine to itself.

    Whatever else it does now may end any time. Hence processor time for the start, and the faster half of the steps.
    """
    with Process(launch(run, "--stop-at", str(_PILOT_STEPS), ranks=ranks), log) as process:
        code = process.end(600)
        assert code == 0, process.text()
    seconds = sorted(line["step_time_s"] for line in run.lines() if "loss" in line)[: _PILOT_STEPS // 2]
    pace_s = statistics.mean(seconds)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy_s = (used.ru_utime + used.ru_stime) / min(ranks, len(os.sched_getaffinity(0)))
    return max(1.0, busy_s - _PILOT_STEPS * pace_s), pace_s


def _key(line: dict[str, Any]) -> str:
    return f"{'training' if 'loss' in line else 'evaluation'} of step {line['step']}"


def _identity(folder: Path) -> tuple[str, int, int]:
    """Of a folder as it is now: one that takes its place has another."""
    stat = folder.stat()
    return folder.name, stat.st_ino, stat.st_ctime_ns


def _changed_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _leave(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
