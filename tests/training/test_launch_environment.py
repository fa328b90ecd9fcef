"""Where the ranks meet, and what stops them before they do."""

import os
import time
from pathlib import Path

import pytest

from vitscale.ground.machine import hold_port
from vitscale.training.deepspeed import distributed


def listeners(port: int) -> set[str]:
    """Addresses at which somebody listens at the port, as Linux writes them, IPv4 and IPv6."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].partition(":")[0] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"}


@pytest.mark.parametrize(
    ("address", "local_size", "expected"),
    [
        ("127.0.0.1", 2, {"0100007F"}),
        ("127.0.0.1", 1, set()),  # the other rank is elsewhere: left to torch, which listens at every address
        ("192.0.2.1", 1, set()),  # not an address of this machine
    ],
)
def test_the_rendezvous_is_served_at_the_master_s_address_alone(monkeypatch, address, local_size, expected):
    with hold_port() as holder:
        port = holder.getsockname()[1]
        for name, value in {"MASTER_ADDR": address, "MASTER_PORT": port, "LOCAL_WORLD_SIZE": local_size}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "")
        monkeypatch.setattr(distributed, "_store", None)
        distributed._serve_rendezvous(2)
        assert listeners(port) == expected
        assert (os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True") == bool(expected)


def test_a_stale_build_lock_is_named_and_a_fresh_one_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert distributed.stale_build_locks() == []
    old = time.time() - 7200
    os.utime(lock, (old, old))
    assert distributed.stale_build_locks() == [lock]


CORES = len(os.sched_getaffinity(0))
TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize(
    ("environment", "local_size", "expected"),
    [
        ({}, 1, CORES),
        ({"OMP_NUM_THREADS": "1"}, 1, None),  # a slot of a study: a second thread would wait for the other slots'
        ({"OMP_NUM_THREADS": "1"}, 2, None),
        ({"OMP_NUM_THREADS": "3"} | TORCHRUN, 2, None),
        ({"OMP_NUM_THREADS": "1"} | TORCHRUN, 2, max(1, CORES // 2)),
        ({"OMP_NUM_THREADS": "1"} | TORCHRUN, 1, None),  # torchrun leaves a single rank alone
    ],
)
def test_threads_are_a_rank_s_part_of_the_cores_unless_people_said(environment, local_size, expected):
    assert distributed.threads_of_a_rank(environment, local_size) == expected
