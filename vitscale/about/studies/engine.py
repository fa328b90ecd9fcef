"""What runs the entries of a study: the contract of its engines, and the one that starts them on this machine.

There, an entry has a device, or a slot of the cores, and is started by `vitscale launch`.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from typing import Protocol

from vitscale.ground.errors import PeerLostError, RecipeError
from vitscale.ground.files.durable import make_folder
from vitscale.ground.storage import regular
from vitscale.ground.wording import counted
from vitscale.launch import Pretraining, count_devices
from vitscale.launch.clusters import Job, launch_command
from vitscale.launch.rank import die_with

LOG_FILE = "launch.log"
"""The file in a run directory that takes what an entry's launch prints."""
_DEVICES, _THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


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
            assert what.run_dir is not None
            environment = self._free.pop(0)
            try:
                self._running[what.run_dir.name] = start_launch(what, environment), environment
            except OSError as error:
                raise PeerLostError(f"{what.run_dir}: a launch cannot be started: {error}") from None

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
    assert what.run_dir is not None
    make_folder(what.run_dir)
    with FileIO(what.run_dir / LOG_FILE, "a", opener=regular) as log:
        return subprocess.Popen(
            launch_command(Job(what), [sys.executable, "-P", "-m", "vitscale"]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,  # a terminal's Ctrl-C reaches the study alone
            preexec_fn=die_with(os.getpid()),
        )
