"""What runs the entries of a study: the contract of its engines, and the three of them.

On this machine an entry has a device, or a slot of the cores, and is started by `vitscale launch`. On Slurm entries are
array jobs, each a launch on a node. On a Ray cluster each is a task that runs `vitscale launch` where Ray has room for
it. Every node must reach the study's folder; under Ray its recipes and the data, too, under the same paths.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from vitscale.ground.errors import EXIT_DONE, PeerLostError, PreemptedError, RecipeError, VitscaleError
from vitscale.ground.files.durable import make_folder, write_text
from vitscale.ground.ray_cluster import connect, import_ray
from vitscale.ground.storage import regular
from vitscale.ground.wording import counted
from vitscale.launch import Pretraining, count_devices
from vitscale.launch.clusters import Job, launch_command
from vitscale.launch.clusters.slurm import hand_in, render_array
from vitscale.launch.rank import die_with
from vitscale.runs.done import read_done
from vitscale.runs.launches import read_launches
from vitscale.runs.names import LAUNCH_FILE
from vitscale.runs.reading import read_object

LOG_FILE = "launch.log"
"""The file in a run directory that takes what an entry's launch prints."""
JOBS_FILE = "slurm-jobs.json"
"""The file in a study's folder of entry -> number of its Slurm job, as ARRAY_INDEX."""
_DEVICES, _THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
_ASK_EVERY_SECONDS = 5.0  # Slurm
_LOOK_EVERY_SECONDS = 0.2  # on a worker of Ray's
_RETRIES = 3  # by Ray, where a worker or its node dies


class Engine(Protocol):
    """Starts launches and reports their ends. A launch goes by the name of its run directory."""

    @property
    def running(self) -> Collection[str]:
        """The names of launches under way, those of an earlier process included."""

    @property
    def room(self) -> int:
        """The number of further launches that it would start now."""

    def start(self, works: Sequence[Pretraining]) -> None:
        """Start or submit these launches, no more than there is room for. Raises `VitscaleError`."""

    def ended(self) -> Mapping[str, int]:
        """Name -> exit code of each launch that has ended since the last call."""

    def tell_to_end(self) -> None:
        """Have all launches save and end."""

    def kill(self) -> None:
        """End all launches at once."""


# ---- This machine ----------------------------------------------------------------------------------------------------


def _slot_environments(slots: int | None) -> list[dict[str, str]]:
    """What each slot adds to the environment of its launches: its share of the devices, or of the cores."""
    devices = count_devices()
    if devices is None:
        raise RecipeError("the CUDA devices of this machine cannot be counted: see nvidia-smi")
    if devices == 0:
        slots = slots or 1
        cores = len(os.sched_getaffinity(0))
        return [{_THREADS: os.environ.get(_THREADS) or str(max(1, cores // slots))}] * slots
    slots = slots or devices
    if slots > devices:
        raise RecipeError(f"--slots {slots}: this machine has {counted(devices, 'CUDA device')}, and a slot needs one")
    visible = [name for name in os.environ.get(_DEVICES, "").split(",") if name]
    named = visible[:devices] or list(map(str, range(devices)))
    each = devices // slots
    return [{_DEVICES: ",".join(named[slot * each : (slot + 1) * each])} for slot in range(slots)]


class LocalEngine:
    """Launches as children of this process, which die with its main thread.

    By default there is a slot a device, or a single one without devices. Raises `RecipeError` if there are more slots
    than devices, or these cannot be counted.
    """

    def __init__(self, slots: int | None) -> None:
        self._free = _slot_environments(slots)
        self._running: dict[str, tuple[subprocess.Popen[bytes], dict[str, str]]] = {}

    @property
    def running(self) -> Collection[str]:
        return self._running.keys()

    @property
    def room(self) -> int:
        return len(self._free)

    def start(self, works: Sequence[Pretraining]) -> None:
        """Start these launches, each in a free slot. Raises `PeerLostError` if a process cannot be started."""
        for what in works:
            environment = self._free.pop(0)
            try:
                self._running[what.directory.name] = start_launch(what, environment), environment
            except OSError as error:
                raise PeerLostError(f"{what.directory}: a launch cannot be started: {error}") from None

    def ended(self) -> Mapping[str, int]:
        """Name -> exit code; for a launch that was killed, the code for "repeat"."""
        codes = {}
        for name, (process, environment) in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[name]
                self._free.append(environment)
                codes[name] = code if code >= 0 else PeerLostError.exit_code
        return codes

    def tell_to_end(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)  # ranks die with their launch

    def _signal(self, number: signal.Signals) -> None:
        for process, _ in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)


def start_launch(what: Pretraining, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start `vitscale launch` for one entry; it dies with the calling thread. Raises OSError."""
    make_folder(what.directory)
    with FileIO(what.directory / LOG_FILE, "a", opener=regular) as log:
        return subprocess.Popen(
            launch_command(Job(what), [sys.executable, "-P", "-m", "vitscale"]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,  # a terminal's Ctrl-C reaches the study alone
            preexec_fn=die_with(os.getpid()),
        )


# ---- Slurm -----------------------------------------------------------------------------------------------------------


class SlurmEngine:
    """Submits array jobs, by default of as many entries at a time as there is room for, and watches the queue.

    Entries that become ready at the same time are one array. The jobs outlive this process, which only watches;
    `JOBS_FILE` records them, so that a repetition watches those that are still in the queue. Options are sbatch's, and
    `python` and `srun` as in `vitscale launch --cluster slurm`. Raises `RecipeError` if there is no Slurm.
    """

    def __init__(self, folder: Path, slots: int | None, options: Mapping[str, str]) -> None:
        self._folder, self._slots, self._options = folder, slots, options
        self._told = False
        self._asked_at = time.monotonic()
        known = read_object(folder / JOBS_FILE) or {}
        queued = _queued()
        self._jobs = {str(name): str(job) for name, job in known.items() if job in queued}

    @property
    def running(self) -> Collection[str]:
        return self._jobs.keys()

    @property
    def room(self) -> int:
        return sys.maxsize  # Slurm takes them all

    def start(self, works: Sequence[Pretraining]) -> None:
        """Submit one array. Raises `RecipeError` if sbatch does not take it."""
        for what in works:
            make_folder(what.directory)
        jobs = [Job(what, options=self._options) for what in works]
        number = hand_in(render_array(jobs, self._folder.absolute().name, self._folder, LOG_FILE, self._slots))
        self._jobs |= {what.directory.name: f"{number}_{index}" for index, what in enumerate(works)}
        write_text(self._folder / JOBS_FILE, json.dumps(self._jobs, indent=1) + "\n")

    def ended(self) -> Mapping[str, int]:
        """Entries whose job has left the queue, with exit codes; all of them, once this process is told to end."""
        if self._told:
            found = dict.fromkeys(self._jobs, PreemptedError.exit_code)
        elif not self._jobs or time.monotonic() - self._asked_at < _ASK_EVERY_SECONDS:
            return {}
        else:
            self._asked_at = time.monotonic()
            try:
                queued = _queued()
            except RecipeError:
                return {}  # a controller that does not answer is asked again
            found = {name: _exit_code(self._folder / name) for name, job in self._jobs.items() if job not in queued}
        for name in found:
            del self._jobs[name]
        return found

    def tell_to_end(self) -> None:
        self._told = True  # to watch no longer: the jobs continue, and `scancel` ends them

    def kill(self) -> None:
        """Do nothing: the jobs continue."""


def _queued() -> set[str]:
    """The array jobs in the queue, as ARRAY_INDEX. Raises `RecipeError` if Slurm cannot be asked."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%F_%K"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise RecipeError("--engine slurm: there is no squeue here: run this where jobs are submitted") from None
    if answer.returncode:
        reason = answer.stderr.strip().rpartition("\n")[2]
        raise RecipeError(f"--engine slurm: squeue does not answer: {reason}")
    return set(answer.stdout.split())


def _exit_code(run_dir: Path) -> int:
    """The exit code of a launch whose job is over; the code for "repeat" if it left none."""
    if read_done(run_dir) is not None:
        return EXIT_DONE
    try:
        last = read_launches(run_dir / LAUNCH_FILE).last
    except VitscaleError:
        last = None
    return (last.exit_code if last is not None else None) or PeerLostError.exit_code


# ---- Ray -------------------------------------------------------------------------------------------------------------


class RayEngine:
    """Tasks on the cluster that RAY_ADDRESS names, or on one started on this machine.

    By default one entry at a time a GPU, or a node in a cluster without GPUs. The options `gpus` and `cpus` are of each
    entry: by default one CPU, and one GPU if there are any.

    Raises `RecipeError` if Ray is missing, there is no cluster, or it can never provide what an entry needs.
    """

    def __init__(self, slots: int | None, options: Mapping[str, str]) -> None:
        self._ray = import_ray()
        connect(self._ray, None)
        there = self._ray.cluster_resources()
        wanted = {"gpus": min(1, int(there.get("GPU", 0))), "cpus": 1} | _numbers(options)
        for name, resource in (("gpus", "GPU"), ("cpus", "CPU")):
            if wanted[name] > there.get(resource, 0):
                raise RecipeError(f"--engine-option {name}={wanted[name]}: the cluster has {there.get(resource, 0):g}")
        own = int(there["GPU"]) // wanted["gpus"] if wanted["gpus"] else len(self._ray.nodes())
        self._slots = slots or own
        remote = self._ray.remote(max_retries=_RETRIES, num_cpus=wanted["cpus"], num_gpus=wanted["gpus"])
        self._perform = remote(perform)
        self._tasks: dict[Any, str] = {}

    @property
    def running(self) -> Collection[str]:
        return self._tasks.values()  # they end with the process that started them

    @property
    def room(self) -> int:
        return self._slots - len(self._tasks)

    def start(self, works: Sequence[Pretraining]) -> None:
        for what in works:
            absolute = replace(what, recipe=str(Path(what.recipe).absolute()), run_dir=what.directory.absolute())
            self._tasks[self._perform.remote(absolute)] = what.directory.name

    def ended(self) -> Mapping[str, int]:
        """Name -> exit code. Raises `RecipeError` if a node lacks what it needs."""
        if not self._tasks:
            return {}
        ready, _ = self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0)
        return {self._tasks.pop(task): self._code(task) for task in ready}

    def _code(self, task: Any) -> int:
        errors = self._ray.exceptions
        try:
            return int(self._ray.get(task))
        except errors.TaskCancelledError:
            return PreemptedError.exit_code
        except errors.RayTaskError as error:
            if isinstance(error.cause, ImportError):
                raise RecipeError(
                    f"a node of the cluster lacks what it needs ({error.cause}). Install the same vitscale everywhere"
                ) from error
            raise  # a bug: with the worker's trace
        except errors.RayError:
            return PeerLostError.exit_code  # the worker or its node has died again and again

    def tell_to_end(self) -> None:
        """Interrupt the tasks, which pass SIGTERM on."""
        for task in self._tasks:
            self._ray.cancel(task)

    def kill(self) -> None:
        for task in self._tasks:
            self._ray.cancel(task, force=True)  # launches die with their workers


def perform(what: Pretraining) -> int:
    """Run a launch on a worker. Returns its exit code."""
    process = start_launch(what, {})
    while process.poll() is None:
        try:
            time.sleep(_LOOK_EVERY_SECONDS)  # not in `wait`, which would keep Ray's interrupt waiting
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
    return process.returncode if process.returncode >= 0 else PeerLostError.exit_code


def _numbers(options: Mapping[str, str]) -> dict[str, int]:
    for name, value in options.items():
        if name not in ("gpus", "cpus"):
            raise RecipeError(f"--engine-option {name}: --engine ray has gpus and cpus")
        if not value.isdecimal():
            raise RecipeError(f"--engine-option {name}={value}: expected a whole number")
    return {name: int(value) for name, value in options.items()}
