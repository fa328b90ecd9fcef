"""Names the rank that is missing when a collective fails or hangs.

Every rank leaves a message at the rendezvous every few seconds. To find missing ranks, one looks twice: a rank whose
message has not changed in between has ended, was stopped or is cut off.
"""

import os
import socket
import threading
import time
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from vitscale.training.deepspeed.distributed import World

INTERVAL_SECONDS = 1.0
_LOOK_SECONDS = 4.0
_STORE_SECONDS = 10.0
_JOIN_SECONDS = 0.1


class Presence(NamedTuple):
    """The last message of one rank: its number, the rank's machine, and where in training it is."""

    words: int
    host: str
    step: int
    phase: str


class MissingRanks:
    """One rank's part. Failing to reach the rendezvous is no error: it means that rank 0, which holds it, is gone."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0
        self._host = socket.gethostname()
        self._store = _connect()
        self._is_cut_off = False

    def answer(self, step: int, phase: str) -> None:
        """Leave a message. Raises nothing."""
        if self._is_cut_off:
            return  # a connection that was closed never comes back, and torch prints a trace for each attempt
        self._count += 1
        word = f"{self._count}|{self._host}|{step}|{phase}"
        try:
            self._store.set(_key(self._world.rank), word)
        except RuntimeError:
            self._is_cut_off = True

    def missing(self) -> list[str]:
        """The ranks that no longer answer, each in words; empty if all do. Takes some seconds.

        Another thread should keep answering meanwhile: it notices at once if rank 0 has ended.
        """
        found: list[list[str]] = []
        thread = threading.Thread(target=lambda: found.append(self._look()), daemon=True)
        thread.start()  # the connection to a machine that is gone may take minutes to fail
        until = time.monotonic() + _LOOK_SECONDS + _STORE_SECONDS
        while thread.is_alive() and time.monotonic() < until and not self._is_cut_off:
            thread.join(_JOIN_SECONDS)
        return found[0] if found else [_ONLY_ZERO]

    def _look(self) -> list[str]:
        try:
            store = _connect()
            before = self._words(store)
            time.sleep(_LOOK_SECONDS)
            after = self._words(store)
        except RuntimeError:
            return [_ONLY_ZERO]
        return [
            f"rank {rank} on {word.host} (step {word.step:,}, {word.phase})" if word else f"rank {rank}"
            for rank, word in after.items()
            if rank != self._world.rank and word == before[rank]
        ]

    def _words(self, store: dist.TCPStore) -> dict[int, Presence | None]:
        words: dict[int, Presence | None] = {}
        for rank in range(self._world.size):
            words[rank] = None
            if store.check([_key(rank)]):
                count, host, step, phase = store.get(_key(rank)).decode().split("|", 3)
                words[rank] = Presence(int(count), host, int(step), phase)
        return words


_ONLY_ZERO = "rank 0, or the machine that it runs on"


def _connect() -> dist.TCPStore:
    """A connection for one caller: waiting for an answer blocks the connection that was asked."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS))


def _key(rank: int) -> str:
    return f"vitscale/present/{rank}"
