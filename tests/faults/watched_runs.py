"""Small runs as processes of their own: started in every way, watched from outside, compared to the last bit."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from processes import children, is_alive

import vitscale
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.ground.machine import free_port
from vitscale.runs.checkpoint import CheckpointStore

PRETRAIN = Path(vitscale.__file__).with_name("pretrain.py")
EXACT = ("step", "loss", "lr", "grad_norm", "batch_digest", "anomalies")
"""What a line of metrics.jsonl says of training itself; evaluations besides. The rest is of time and memory."""

_BASE: dict[str, Any] = {
    "precision": "bf16",
    "model": {"patch_size": 8, "width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 2, "dropout": 0.1},
    "data": {"train": "train", "image_size": 32},
    "batch": {"global": 16, "micro_max": 4},
    "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1, "clip_norm": 1.0},
    "schedule": {"duration": {"steps": 100}, "warmup": {"steps": 10}},
    "checkpoint": {"every": {"steps": 20}, "keep": 3},
    "ema": {"decay": 0.99},
    "logging": {"every": 1, "tensorboard": False, "batch_digest": True},
}
EVALUATED: dict[str, Any] = {
    "evaluation": {"validation": "test", "every": {"steps": 50}, "batch": 2},
    "selection": {"metric": "validation/loss", "mode": "min"},
}
"""Blocks of the recipe with evaluations that take a second."""
LONG: dict[str, Any] = {"schedule": {"duration": {"steps": 100_000}, "warmup": {"steps": 10}}}
"""Blocks of the recipe of a run that does not end by itself."""

_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_PRCTL = ctypes.CDLL(None).prctl
_LOOK_EVERY_SECONDS = 0.01

# `vitscale launch` that takes a rank for silent after seconds, where the command waits for a minute.
_IMPATIENT_LAUNCH = """
import sys
from pathlib import Path
from vitscale.launch import Launch, Pretraining, PretrainingRanks, Supervisor

with Supervisor(grace_s=20, silence_s=8) as supervisor:
    ranks = PretrainingRanks(Pretraining(sys.argv[1], run_dir=Path(sys.argv[2]), ranks=int(sys.argv[3])))
    sys.exit(Launch(ranks.run_dir, ranks, supervisor).run())
"""


def write_data(root: Path) -> None:
    """Datasets `train` and `test`, the second large enough for an evaluation that takes a second."""
    write_generated_dataset(root / "train", [48, 48, 48, 48], seed=1)
    write_generated_dataset(root / "test", [400], seed=2)


def write_recipe(path: Path, root: Path, /, **blocks: Any) -> Path:
    """The small recipe, with data under `root` and some fields replaced, block by block. Returns `path`."""
    content = dict(_BASE)
    for key, value in blocks.items():
        both = isinstance(value, dict) and isinstance(content.get(key), dict) and "name" not in value
        content[key] = {**content[key], **value} if both else value
    content["data"] = {**content["data"], "root": str(root)}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


class Run:
    """A run directory, seen from outside."""

    def __init__(self, recipe: Path, run_dir: Path) -> None:
        self.recipe, self.dir = recipe, run_dir
        self.checkpoints = run_dir / "checkpoints"
        self.metrics = run_dir / "metrics.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl: those that are whole."""
        return _json_lines(self.metrics)

    def step(self) -> int:
        """The last one in metrics.jsonl; 0 before the first."""
        lines = self.lines()
        return lines[-1]["step"] if lines else 0

    def curve(self) -> list[dict[str, Any]]:
        """What must be the same however often a run was interrupted, line by line."""
        return [
            {key: value for key, value in line.items() if key in EXACT or key.startswith("eval/")}
            for line in self.lines()
        ]

    def saved(self) -> list[int]:
        """Steps of its checkpoints, oldest first."""
        return CheckpointStore(self.checkpoints).steps()

    def state(self, step: int) -> dict[str, Any]:
        """Masters, moments and averages of a checkpoint, whole, and what else is restored from it. Verifies it."""
        reader = CheckpointStore(self.checkpoints).open(step)
        index = reader.index
        rest = {"position": index.position, "anomalies": index.anomalies, "selection": index.selection}
        return {f"{kind}/{name}": reader.parameter(name, kind) for kind in index.kinds for name in index.shapes} | rest

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Of launch.jsonl."""
        return [event for event in _json_lines(self.dir / "launch.jsonl") if event["event"] == kind]

    def is_done(self) -> bool:
        return (self.dir / "DONE").exists()


MakeRun = Callable[..., Run]
"""(blocks of the recipe) -> a run that has not begun, of the small recipe."""


def assert_same(run: Run, other: Run) -> None:
    """Every line of metrics, and the final checkpoint to the last bit."""
    assert run.is_done() and other.is_done()
    assert run.curve() == other.curve()
    last = other.saved()[-1]
    assert run.saved()[-1] == last and differences(run.state(last), other.state(last)) == []


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what differs in a single bit between two states."""

    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b

    return sorted(key for key in one.keys() | other.keys() if not equal(one.get(key), other.get(key)))


def launch(run: Run, *options: str, ranks: int = 2) -> list[str]:
    """The command line of `vitscale launch`."""
    main = "import sys; sys.argv[0] = 'vitscale'; from vitscale.cli.entry import vitscale; vitscale()"
    return [
        sys.executable,
        "-c",
        main,
        "launch",
        str(run.recipe),
        "--run-dir",
        str(run.dir),
        "--ranks",
        str(ranks),
        *options,
    ]


def impatient_launch(run: Run, ranks: int = 2) -> list[str]:
    """The same, but for noticing silent ranks within seconds."""
    return [sys.executable, "-c", _IMPATIENT_LAUNCH, str(run.recipe), str(run.dir), str(ranks)]


def deepspeed(run: Run) -> list[str]:
    """Two ranks, started by DeepSpeed's launcher."""
    return [*_beside_python("deepspeed"), "--num_accelerators", "2", "--master_port", free_port(), *pretrain(run)[1:]]


def torchrun(run: Run) -> list[str]:
    """Two ranks, started by torchrun."""
    return [*_beside_python("torchrun"), "--nproc-per-node", "2", "--master-port", free_port(), *pretrain(run)[1:]]


def pretrain(run: Run) -> list[str]:
    """One rank, started by nobody but Python."""
    return [sys.executable, str(PRETRAIN), "--recipe", str(run.recipe), "--run-dir", str(run.dir)]


def _beside_python(program: str) -> list[str]:
    return [str(Path(sys.executable).with_name(program))]


class Process:
    """A command that was started, with all that it writes in one file. A context manager, which leaves nothing alive.

    It dies with whoever started it.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._begins_at = log.stat().st_size if log.exists() else 0
        here = os.getpid()

        def bind() -> None:
            _PRCTL(_DIE_WITH_PARENT, signal.SIGKILL)
            if os.getppid() != here:
                os.kill(os.getpid(), signal.SIGKILL)

        self._seen: set[int] = set()  # every process of it that was ever looked at
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": str(PRETRAIN.parents[1]), **(environment or {})},
                start_new_session=True,
                preexec_fn=bind,
            )
        self.pid = self._process.pid

    def ranks(self) -> dict[int, int]:
        """Rank -> number of its process, of those that run."""
        found = {}
        for pid in _descendants(self.pid):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:  # it has just ended
                continue
            rank = [entry[5:] for entry in environment if entry.startswith(b"RANK=")]
            if rank and PRETRAIN.name.encode() in command and is_alive(pid):
                found[int(rank[0])] = pid
        self._seen |= set(found.values())
        return found

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """As at a terminal: SIGINT to the command and all that it has started, ranks of `vitscale launch` apart."""
        os.killpg(self.pid, signal.SIGINT)

    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def until(self, is_so: Callable[[], Any], seconds: float = 120, *, may_end: bool = False) -> None:
        """Wait until something is so; fails, with what was written, where the command ends before or time is up."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self.code() is not None  # before looking: what it has done last counts
            if is_so():
                return
            assert may_end or not ended, f"it ended with {self.code()}:\n{self.text()}"
            assert time.monotonic() < deadline, f"waited {seconds} s in vain:\n{self.text()}"
            time.sleep(_LOOK_EVERY_SECONDS)

    def go_on_for(self, seconds: float) -> None:
        """Wait for so long; fails where the command ends before."""
        due = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > due)

    def end(self, seconds: float = 240) -> int:
        """Wait for the end: the exit code. No rank may outlive it."""
        self.ranks()
        self.until(lambda: self.code() is not None, seconds)
        self.until(lambda: not any(is_alive(pid) for pid in self._seen), 5, may_end=True)
        code = self.code()
        assert code is not None
        return code

    def text(self) -> str:
        """All that it and its ranks have written so far."""
        return self.log.read_bytes()[self._begins_at :].decode(errors="replace")

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill whatever of it is left."""
        for pid in {self.pid, *_descendants(self.pid), *self._seen}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def bare(run: Run, log: Path, **environment: str) -> list[Process]:
    """Two ranks without any launcher: nobody but they themselves ends them."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [
        Process(pretrain(run), log.with_suffix(f".{rank}"), shared | environment | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]


def finish(run: Run, log: Path, undisturbed: Run) -> str:
    """Repeat the command in peace, after which the run is as the undisturbed one: what it wrote."""
    with Process(launch(run), log) as process:
        assert process.end() == 0, process.text()
    assert_same(run, undisturbed)
    return process.text()


def _descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *_descendants(child))]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]
