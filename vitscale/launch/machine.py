"""What the supervisor asks of its machine. No torch: it starts at once and holds no device."""

import socket
import subprocess
import sys
from pathlib import Path

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
STOPPED = "stopped, T"
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk or device", "T": STOPPED, "Z": "ended"}
_COUNTING_SECONDS = 120.0

# CUDA's own count, which follows CUDA_VISIBLE_DEVICES. 34 and 100 are its words for "no driver" and "no device".
_COUNT_DEVICES = """
import ctypes
count = ctypes.c_int()
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    error = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
except OSError:
    error = 34
print(count.value if error in (0, 34, 100) else f"error {error}")
"""


def count_devices() -> int | None:
    """Number of CUDA devices that a rank would see; None where CUDA cannot tell.

    Counted by a process of its own: a driver in trouble may hang, and whoever has opened it keeps what it saw.
    """
    command = [sys.executable, "-I", "-S", "-c", _COUNT_DEVICES]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_COUNTING_SECONDS).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return int(answer) if answer.isdecimal() else None


def hold_port() -> socket.socket:
    """A TCP port at which the ranks can meet, kept from everybody else for as long as the socket is open.

    It does not listen, and allows the one who does to share the port; the system gives it to nobody else meanwhile.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder


def process_state(pid: int) -> str:
    """State of a process in words, as Linux has it in /proc."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return _STATES.get(letter, letter)


def out_of_memory_kills() -> int | None:
    """Processes of this control group that the kernel has killed for want of memory; None where it does not say."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in groups:
        if controllers == "":
            folder, file = _CONTROL_GROUPS, "memory.events"
        elif "memory" in controllers.split(","):
            folder, file = _CONTROL_GROUPS / "memory", "memory.oom_control"
        else:
            continue
        for place in (folder / path.lstrip("/"), folder):  # inside a container the path may be that of the host
            try:
                lines = (place / file).read_text().splitlines()
            except OSError:
                continue
            for name, _, count in (line.partition(" ") for line in lines):
                if name == "oom_kill":
                    return int(count)
    return None
