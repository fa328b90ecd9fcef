"""The process group of a run: joining it, and how its ranks end."""

import contextlib
import ctypes
import errno
import gc
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitscale.ground.errors import MachineError, PeerLostError, RecipeError
from vitscale.ground.heartbeat import HEARTBEAT_VARIABLE
from vitscale.ground.machine import cores_near, usable_cores
from vitscale.training.deepspeed.lean_deepspeed import deepspeed
from vitscale.training.deepspeed.progress import tell

_STALE_LOCK_SECONDS = 1800
_AFTER_THE_WATCHDOG_S = 60
_THREADS_BESIDE_A_GPU = 4  # for what the host computes meanwhile, which is little
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_HAS_A_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_store: dist.TCPStore | None = None  # the rendezvous lives as long as this does


@dataclass(frozen=True)
class World:
    """This process among the ranks of a run."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and prints for all."""
        return self.rank == 0


def start(rank: int, size: int, local_rank: int, timeout: timedelta = timedelta(minutes=10)) -> World:
    """Join the process group: NCCL on CUDA devices, gloo on CPUs.

    Raises `MachineError` for more local ranks than devices, `RecipeError` if the ranks cannot meet, and `PeerLostError`
    if that is because one has failed.
    """
    for lock in stale_build_locks() if rank == 0 else []:
        tell(f"WARNING: {lock}: a killed build left this lock; whatever needs that build waits forever: rm {lock}")
    threads = threads_of_a_rank(os.environ, int(os.environ.get("LOCAL_WORLD_SIZE", str(size))))
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise MachineError(
                f"local rank {local_rank} has no device: this machine has {torch.cuda.device_count()} CUDA devices; "
                f"start at most one rank per device"
            )
        device, backend = torch.device("cuda", local_rank), "nccl"
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # no audit would see such sums
        threads = None if threads is None else min(threads, _THREADS_BESIDE_A_GPU)
        _stay_near(device)
        gc.disable()  # ranks would pause at different times; the trainer collects where it logs
    else:
        device, backend = torch.device("cpu"), "gloo"
        _keep_freed_memory()
        # Without it DeepSpeed compiles a shared-memory operator inside init_distributed, and hangs on a stale lock.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if threads is not None:
        torch.set_num_threads(threads)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        socket.getaddrinfo(os.environ["MASTER_ADDR"], None)
        if rank == 0 and os.environ.get(_HAS_A_STORE) != "True":
            _serve_rendezvous(size)
        deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
    except (OSError, dist.DistError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        # Under `vitscale launch`, a rank that does not come has failed, and its launch says why.
        kind = PeerLostError if HEARTBEAT_VARIABLE in os.environ and is_lost_peer(error) else RecipeError
        raise kind(
            f"the ranks cannot meet at MASTER_ADDR:MASTER_PORT {where}: {reason}. Is the port in use, the address "
            f"right, every rank started? If a machine has several networks, or resolves its own name to 127.0.1.1, "
            f"set {backend.upper()}_SOCKET_IFNAME to that address's interface; this machine has "
            f"{', '.join(name for _, name in socket.if_nameindex() if name != 'lo') or 'none'}"
        ) from None
    # Objects that the imports made stay to the end. A collection that looks at them takes half a second, and
    # DeepSpeed's stage 3 runs one when it is set up.
    gc.freeze()
    return World(rank, size, device)


def _keep_freed_memory() -> None:
    """Have the C library keep what one step frees for the next one.

    By default it returns tensors of more than 32 MiB to the system, which makes each of their pages anew in the next
    step: 6 % of a step of ViT-B/16 on two cores. Only glibc has these settings.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 64 << 20)
        library.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def _stay_near(device: torch.device) -> None:
    """Bind this process and its later threads to the cores of the device's NUMA node, if the system tells which."""
    facts: Any = torch.cuda.get_device_properties(device)  # torch's types lack these fields
    with contextlib.suppress(AttributeError, OSError):  # of another torch; cores that were taken from us meanwhile
        address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        os.sched_setaffinity(0, cores_near(address))


def threads_of_a_rank(environment: Mapping[str, str], local_size: int) -> int | None:
    """Threads that a rank computes with on the CPU: its share of the cores; None to leave it to OMP_NUM_THREADS.

    torchrun sets that to 1 for several ranks, whatever the machine has; if anyone else sets 1, it is meant.
    """
    set_by_torchrun = environment.get(_HAS_A_STORE) == "True" and local_size > 1
    if environment.get("OMP_NUM_THREADS") in (None, "1" if set_by_torchrun else None):
        return max(1, usable_cores() // local_size)
    return None


def _serve_rendezvous(size: int) -> None:
    """Serve the rendezvous on rank 0, at MASTER_ADDR only: torch by default listens at every address of the machine.

    That default stays if MASTER_ADDR is not an address of this machine, or is one that only this machine can reach
    although there are ranks elsewhere.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    is_loopback = str(address[0]).startswith("127.") or address[0] == "::1"
    if is_loopback and int(os.environ.get("LOCAL_WORLD_SIZE", str(size))) < size:
        return
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return
        raise
    global _store
    _store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    os.environ[_HAS_A_STORE] = "True"  # torch's way to say that rank 0 need not open one


def set_timeout_everywhere(step_timeout_s: float) -> None:
    """Let every process group wait longer than the watchdog: its message is more useful than NCCL's or gloo's.

    DeepSpeed makes groups of its own, with a default of 30 minutes.
    """
    from torch.distributed import distributed_c10d

    timeout = timedelta(seconds=step_timeout_s + _AFTER_THE_WATCHDOG_S)
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


def stale_build_locks() -> list[Path]:
    """Locks of torch extension builds begun more than 30 minutes ago. vitscale builds none, but an addition may."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    old = time.time() - _STALE_LOCK_SECONDS
    stale = []
    for lock in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        with contextlib.suppress(FileNotFoundError):  # its build has just ended
            stale += [lock] if lock.stat().st_mtime < old else []
    return stale


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank has gone or does not answer: gloo says so only in words."""
    words = ("closed by peer", "reset by peer", "Broken pipe", "Timed out", "timed out", "Connection refused")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def finish(code: int) -> None:
    """End this rank at once with `code`.

    Leaving through the interpreter lets library threads abort a process that has finished its work (seen with gloo),
    so that a good run would report a bad code.
    """
    if dist.is_initialized() and code == 0:
        dist.barrier()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a terminal that was closed
            if stream is not None:
                stream.flush()
    os._exit(code)
