"""What runs the entries of a study: the contract of its engines, and the two of them.

On this machine an entry has a device, or a slot of the cores, and is started by `vitscale launch`. On Slurm entries are
array jobs, each a launch on a node; every node must reach the study's folder.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Protocol

from vitscale.ground.errors import EXIT_DONE, PeerLostError, PreemptedError, RecipeError, VitscaleError, turned
from vitscale.ground.files.durable import make_folder, write_text
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

LOG_FILE = "launch.log"  # the file in a run directory that takes what an entry's launch prints
JOBS_FILE = "slurm-jobs.json"  # the file in a study's folder of entry -> number of its Slurm job, as ARRAY_INDEX
_DEVICES, _THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
_ASK_EVERY_SECONDS = 5.0  # Slurm


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
            with turned(f"{what.directory}: a launch cannot be started", PeerLostError, OSError):
                self._running[what.directory.name] = self._launch(what, environment), environment

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

    def _launch(self, what: Pretraining, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
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

    def _signal(self, number: signal.Signals) -> None:
        for process, _ in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)


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
        self._jobs = {str(name): str(job) for name, job in known.items() if str(job) in queued}

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
