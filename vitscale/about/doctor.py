"""Examines what this machine has for a run, what would stop or slow one, and how to mend it.

Every package is imported only when it is examined, since torch may be what cannot be loaded.
"""

import ctypes
import importlib.metadata
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, Self

from packaging.requirements import Requirement

from vitscale.ground.errors import VitscaleError, as_plain
from vitscale.ground.machine import available_memory, count_devices, cpu_quota, has_bf16_instructions
from vitscale.ground.native import libjpeg_turbo_version
from vitscale.ground.versions import installed_version
from vitscale.ground.wording import counted

State = Literal["good", "slows", "stops"]

_GB = 1e9
_SHARED_MEMORY = 1 << 30  # bytes, enough for NCCL and the ranks of a node
_OPEN_FILES = 4096
_ROOM = 5 * _GB  # for a checkpoint of ViT-L/16 and its successor
_MEMORY = 4 * _GB
_FIRST_WITH_BF16, _FIRST_WITH_FP8 = (8, 0), (8, 9)  # compute capabilities
_UNSYNCHRONISED = 5  # what adjtimex returns for a clock that is not synchronised
_PREFIXES = ("CUDA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "ONEDNN_", "DNNL_", "DS_", "TORCH_", "PYTORCH_", "KMP_")


@dataclass(frozen=True)
class Diagnosis:
    """The result of examining one thing: whether it is as it should be, slows runs, or stops them."""

    what: str
    state: State
    found: str
    mend: str = ""  # what to do about it, if anything

    @classmethod
    def of(cls, what: str, is_good: bool, found: str, mend: str, otherwise: State = "slows") -> Self:
        """That of a thing which is good, or else has to be mended."""
        return cls(what, "good", found) if is_good else cls(what, otherwise, found, mend)


def examine(folder: Path) -> Iterator[Diagnosis]:
    """Examine everything, one thing after the other; the last ones take seconds.

    `folder`: where runs will be written to; it need not exist.
    """
    devices = count_devices()  # in a separate process; this waits for it if the driver is in trouble
    yield from chain(_packages(), _decoder(), _processor(), _memory(), _shared_memory(devices), _limits(devices))
    yield from chain(_disk(folder), _clock(), _network(), _variables(), _torch(devices))


def _packages() -> Iterator[Diagnosis]:
    try:
        required = [Requirement(text) for text in importlib.metadata.requires("vitscale") or []]
    except importlib.metadata.PackageNotFoundError:
        yield Diagnosis("packages", "stops", "vitscale itself is not installed here", "pip install .")
        return
    wrong = []
    for requirement in required:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = "absent"
        if version == "absent" or not requirement.specifier.contains(version, prereleases=True):
            wrong.append((requirement, version))
    if wrong:
        found = ", ".join(f"{requirement.name} {version}" for requirement, version in wrong)
        wanted = " ".join(f"'{requirement.name}{requirement.specifier}'" for requirement, _ in wrong)
        yield Diagnosis("packages", "stops", found, f"pip install {wanted}")
        return
    shown = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "accelerate", "numpy")}
    shown["ffcv"] = installed_version("ffcv")  # an extra
    yield Diagnosis("packages", "good", ", ".join(f"{name} {version}" for name, version in shown.items()))


def _decoder() -> Iterator[Diagnosis]:
    try:
        yield Diagnosis("decoder", "good", f"libjpeg-turbo {libjpeg_turbo_version()}")
    except VitscaleError as error:
        yield Diagnosis("decoder", "stops", "images cannot be decoded", as_plain(error)[1])  # no hint at itself


def _processor() -> Iterator[Diagnosis]:
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    if quota is not None and quota < cores:
        found = f"{cores} cores, of which the control group grants {quota:g}: threads wait for each other"
        mend = f"keep processes to them (taskset -c 0-{max(0, int(quota) - 1)} COMMAND), or ask for more"
        yield Diagnosis("cores", "slows", found, mend)
    else:
        yield Diagnosis("cores", "good", counted(cores, "core"))
    has_bf16 = has_bf16_instructions()
    if has_bf16:
        yield Diagnosis("bf16 on CPUs", "good", "the processor has instructions for it")
    elif has_bf16 is False:
        emulated = "emulated: the processor has no instructions for it, or ONEDNN_MAX_CPU_ISA forbids them"
        mend = "nothing with precision: auto, the default, which then trains in fp32 on CPUs"
        yield Diagnosis("bf16 on CPUs", "slows", emulated, mend)


def _memory() -> Iterator[Diagnosis]:
    free = available_memory()
    if free is not None:
        mend = "end other processes, or raise the limit of the container"
        yield Diagnosis.of("memory", free >= _MEMORY, f"{free / _GB:,.1f} GB free", mend)


def _shared_memory(devices: int | None) -> Iterator[Diagnosis]:
    with suppress(OSError):
        size, is_for_ranks = shutil.disk_usage("/dev/shm"), (devices or 0) > 1
        found = f"{size.free / _GB:,.1f} of {size.total / _GB:,.1f} GB free"
        mend = "docker run --shm-size=8g, or an emptyDir of medium Memory at /dev/shm"
        is_enough = size.total >= _SHARED_MEMORY
        yield Diagnosis.of("shared memory", is_enough, found, mend, "stops" if is_for_ranks else "slows")


def _limits(devices: int | None) -> Iterator[Diagnosis]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_many = soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES
    mend = f"ulimit -n {_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)}"
    yield Diagnosis.of("open files", is_many, f"at most {soft:,}", mend)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and devices:
        mend = "ulimit -l unlimited (docker run --ulimit memlock=-1)"
        found = f"at most {locked / _GB:,.2f} GB: InfiniBand cannot be used"
        yield Diagnosis("locked memory", "slows", found, mend)


def _disk(folder: Path) -> Iterator[Diagnosis]:
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    for what, where, room in (("run folder", existing, _ROOM), ("temporary", Path(tempfile.gettempdir()), 1e9)):
        free = shutil.disk_usage(where).free
        if not where.is_dir():
            yield Diagnosis(what, "stops", f"{where} is not a folder", "choose another one (--run-dir)")
        elif not os.access(where, os.W_OK):
            mend = "chmod it, or choose another one" + (" (TMPDIR)" if what == "temporary" else " (--run-dir)")
            yield Diagnosis(what, "stops", f"{where} cannot be written", mend)
        else:
            mend = "make room; `checkpoint.keep` and `checkpoint.dir` say what is kept where"
            yield Diagnosis.of(what, free >= room, f"{where}: {free / _GB:,.1f} GB free", mend)


def _clock() -> Iterator[Diagnosis]:
    """Whether the machine's clock is synchronised: events on several nodes are ordered by it."""
    with suppress(OSError, AttributeError):
        # struct timex is shorter than this everywhere; all zeros only queries and sets nothing.
        answer = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024))
        if answer == _UNSYNCHRONISED:
            found = "is not synchronised, or the container does not say so; on several nodes logs are then out of order"
            yield Diagnosis("clock", "slows", found, "install chrony or ntpd")
        elif answer >= 0:
            yield Diagnosis("clock", "good", "is synchronised")


def _network() -> Iterator[Diagnosis]:
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError:
        addresses = []
    if not addresses:
        yield Diagnosis("host name", "slows", f"{name} has no address", f"echo '127.0.0.1 {name}' >> /etc/hosts")
    elif all(address.startswith("127.") or address == "::1" for address in addresses):
        mend = "on several nodes name an address to the others: --master ADDRESS, NCCL_SOCKET_IFNAME"
        yield Diagnosis("host name", "good", f"{name} is {', '.join(addresses)}, which other nodes cannot reach", mend)
    else:
        yield Diagnosis("host name", "good", f"{name} is {', '.join(addresses)}")


def _variables() -> Iterator[Diagnosis]:
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)]
    if found:
        yield Diagnosis("variables", "good", " ".join(found))


def _torch(devices: int | None) -> Iterator[Diagnosis]:
    if devices is None:
        yield Diagnosis(
            "GPUs", "stops", "CUDA does not answer", "nvidia-smi; dmesg | grep -i nvrm; restart the machine"
        )
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Diagnosis("torch", "stops", f"cannot be imported: {error}", "pip install --force-reinstall torch")
        return
    if devices == 0:
        yield Diagnosis("GPUs", "good", "none: runs compute on CPUs")
    elif not torch.cuda.is_available():
        mend = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
        yield Diagnosis("GPUs", "stops", f"{counted(devices, 'GPU')}, and torch {torch.__version__} sees none", mend)
    else:
        yield from _gpus()
    try:
        from vitscale.training.beginning.automatic import missing_for_compiling
        from vitscale.training.deepspeed.distributed import stale_build_locks
    except (ImportError, OSError) as error:
        yield Diagnosis("DeepSpeed", "stops", f"cannot be imported: {error}", "pip install --force-reinstall deepspeed")
        return
    missing = missing_for_compiling("cuda" if torch.cuda.is_available() else "cpu")
    found = f"parallelism.compile cannot be used: no {missing}" if missing else "there for parallelism.compile"
    yield Diagnosis.of("compiler", not missing, found, "sudo apt-get install -y g++ python3-dev openssl")
    for lock in stale_build_locks():
        found = f"{lock}: left by a killed build; whatever needs that build waits forever"
        yield Diagnosis("build lock", "stops", found, f"rm {lock}")


def _gpus() -> Iterator[Diagnosis]:
    from torch import cuda, distributed

    for index in range(cuda.device_count()):
        model, capability = cuda.get_device_name(index), cuda.get_device_capability(index)
        free, total = cuda.mem_get_info(index)
        firsts = {"bf16": _FIRST_WITH_BF16, "fp8": _FIRST_WITH_FP8}
        formats = [name for name, first in firsts.items() if capability >= first]
        found = f"{model}, {free / _GB:,.1f} of {total / _GB:,.1f} GB free, {' and '.join(formats) or 'no bf16'}"
        if not formats:
            yield Diagnosis(f"GPU {index}", "slows", found, "--set precision=fp32")
        elif free < total / 2:
            yield Diagnosis(f"GPU {index}", "slows", f"{found}: somebody else uses it", "nvidia-smi says who")
        else:
            yield Diagnosis(f"GPU {index}", "good", found)
    if not distributed.is_nccl_available():
        yield Diagnosis("NCCL", "stops", "torch comes without it", "pip install --force-reinstall torch")
    else:
        yield Diagnosis("NCCL", "good", ".".join(map(str, cuda.nccl.version())))
