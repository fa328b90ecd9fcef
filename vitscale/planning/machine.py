"""What this machine has: memory that can still be had, and instructions for bf16. Linux only; elsewhere unknown."""

import os
import re
from contextlib import suppress
from pathlib import Path

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is what ARM calls it
_ISAS_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that all processes here can still take together, by the kernel and by the control groups we are in.

    File caches count as free. None where nothing says so. `root` holds `proc` and `sys`.
    """
    found = [*_of_the_machine(root), *_of_groups(root)]
    return max(0, min(found)) if found else None


def _of_the_machine(root: Path) -> list[int]:
    with suppress(OSError):
        line = re.search(r"^MemAvailable:\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
        return [int(line[1]) << 10] if line else []
    return []


def _of_groups(root: Path) -> list[int]:
    """What is left below the limit of each control group, version 1 or 2, from ours up to the top."""
    found = []
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, current, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit, current, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        own = top / path.lstrip("/")
        # In a container the path may be that of the machine, while the group itself is at the top.
        for folder in (own, *own.parents):
            with suppress(OSError, ValueError):  # "max" is no limit
                at_most, used = int((folder / limit).read_text()), int((folder / current).read_text())
                reclaimable = re.search(rf"^{cache} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
                found.append(at_most - used + (int(reclaimable[1]) if reclaimable else 0))
            if folder == top:
                break
    return found


def has_bf16_instructions(root: Path = Path("/")) -> bool | None:
    """Whether torch multiplies bf16 numbers with instructions of the processor; None where nothing says so.

    oneDNN, which multiplies for torch, can be kept from using them by its own environment variable.
    """
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _ISAS_WITHOUT_BF16:
        return False
    with suppress(OSError):
        lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", (root / "proc/cpuinfo").read_text(), re.MULTILINE)
        if lines:
            return bool(_BF16_FLAGS & set(lines[0].split()))
    return None
