"""What this machine has: devices, memory, processes, ports, instructions. Linux only; elsewhere unknown. No torch."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STOPPED = "stopped, T"

_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is ARM's name
_ISAS_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk or device", "T": STOPPED, "Z": "ended"}
_COUNTING_SECONDS = 120.0

# CUDA's own count, which respects CUDA_VISIBLE_DEVICES. 34 and 100 are its codes for "no driver" and "no device".
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
    """The number of CUDA devices that a rank would see; None if CUDA cannot tell.

    They are counted in a separate process: a driver in trouble may hang, and a process that has initialised CUDA keeps
    the devices it saw then.
    """
    command = [sys.executable, "-I", "-S", "-c", _COUNT_DEVICES]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_COUNTING_SECONDS).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return int(answer) if answer.isdecimal() else None


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that all processes here together can still allocate; None if unknown.

    The least of what the kernel and our control groups allow; file caches count as free. `root` is the folder that
    contains `proc` and `sys`.
    """
    found = _of_groups(root)
    with suppress(OSError):
        line = re.search(r"^MemAvailable:\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
        found += [int(line[1]) << 10] if line else []
    return max(0, min(found)) if found else None


def _of_groups(root: Path) -> list[int]:
    """Bytes left below the limit of each control group, version 1 or 2, from ours up to the top."""
    found = []
    for version, folder in _groups("memory", root):
        limit, current, cache = _MEMORY_FILES[version]
        with suppress(OSError, ValueError):  # "max" is no limit
            at_most, used = int((folder / limit).read_text()), int((folder / current).read_text())
            reclaimable = re.search(rf"^{cache} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            found.append(at_most - used + (int(reclaimable[1]) if reclaimable else 0))
    return found


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The number of cores that our control groups let us use, the least of their limits; None if they set none."""
    quotas = [quota for version, folder in _groups("cpu", root) for quota in _quota_of(version, folder)]
    return min(quotas, default=None)


def usable_cores(root: Path = Path("/")) -> int:
    """The number of cores that this process may use: those it is bound to, as far as its control groups grant them."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(cpu_quota(root) or cores)))


def cores_near(pci_address: str, root: Path = Path("/")) -> set[int]:
    """Of the cores that this process is bound to, those of a device's NUMA node; all where that is unknown or none.

    Args:
        pci_address: the device's, such as "0000:1b:00.0".
    """
    bound = os.sched_getaffinity(0)
    with suppress(OSError, ValueError):
        node = int((root / "sys/bus/pci/devices" / pci_address / "numa_node").read_text())  # -1 on machines without
        ranges = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip().split(",")
        ends = [[int(end) for end in each.split("-")] for each in ranges]
        return bound & {core for each in ends for core in range(each[0], each[-1] + 1)} or bound
    return bound


def divide_memory_finely() -> None:
    """Before torch's import: have its CUDA memory grow in place, not in pieces, unless the environment says how."""
    if os.environ.keys().isdisjoint({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def share_cores() -> None:
    """Let idle threads of OpenMP sleep, unless the environment says otherwise. To be called before torch is imported.

    They spin by default, and beside other processes keep each other from the cores: one rank of 2 threads trained at a
    quarter of the pace, or less (docs/LOG.md).
    """
    if os.environ.keys().isdisjoint({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"}):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def _quota_of(version: int, folder: Path) -> list[float]:
    with suppress(OSError, ValueError):  # "max" is no limit
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return [int(quota) / int(period)] if int(quota) > 0 else []  # -1 is no limit
    return []


def out_of_memory_kills(root: Path = Path("/")) -> int | None:
    """The number of processes of this control group that the kernel killed for lack of memory; None if unknown."""
    for version, folder in _groups("memory", root):
        with suppress(OSError):
            events = (folder / ("memory.events" if version == 2 else "memory.oom_control")).read_text()
            if kills := re.search(r"^oom_kill (\d+)$", events, re.MULTILINE):
                return int(kills[1])
    return None


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Version (1 or 2) and folder of each control group under this controller, from ours up to the top."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, top = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, top = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        own = top / path.lstrip("/")
        # In a container the path may be the host's, while the group itself is at the top.
        for folder in (own, *own.parents):
            yield version, folder
            if folder == top:
                break


def has_bf16_instructions(root: Path = Path("/")) -> bool | None:
    """Whether the processor has bf16 instructions that torch will use; None if unknown.

    oneDNN, which does torch's multiplications, can be kept from using them by ONEDNN_MAX_CPU_ISA.
    """
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _ISAS_WITHOUT_BF16:
        return False
    with suppress(OSError):
        lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", (root / "proc/cpuinfo").read_text(), re.MULTILINE)
        if lines:
            return bool(_BF16_FLAGS & set(lines[0].split()))
    return None


def hold_port() -> socket.socket:
    """Reserve a TCP port at which the ranks can meet, for as long as the returned socket is open.

    The socket does not listen, and lets the one that does share the port; the system gives it to nobody else meanwhile.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder


def free_port() -> str:
    """A TCP port of this machine that is free at the moment."""
    with hold_port() as holder:
        return str(holder.getsockname()[1])


def process_state(pid: int) -> str:
    """The state of a process in words, from /proc; "gone" if there is no such process."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return _STATES.get(letter, letter)
