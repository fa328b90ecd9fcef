"""Fetches a file from a URL until its digest is right.

`vitscale.ground.storage` already retries a network's passing errors. This is for a file that arrives without an error
but is wrong: a damaged transfer, or a file that is being replaced at that moment.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar

from vitscale.ground.storage import RemoteFile, never, pause

PAUSES = (0.5, 2.0)  # seconds before the second and third attempts

Result = TypeVar("Result")


class Digest(Protocol):
    """A hash object of hashlib or xxhash."""

    def update(self, data: bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


class Promise(NamedTuple):
    """What a file should be: its size in bytes, its digest and that digest's name, and which file says so."""

    bytes: int
    digest_name: str
    digest: str
    by: str


class WrongContentError(Exception):
    """A fetched file is not what was promised; the message says which and how."""


class _WrongDigestError(WrongContentError):
    """A fetched file has the wrong digest, which another transfer may put right."""


def fetch(
    url: str,
    promise: Promise,
    digest: Callable[[], Digest],
    write: Callable[[bytes, int], object],
    cancelled: Callable[[], bool] = never,
) -> None:
    """Fetch a file, with up to three transfers until its digest is right.

    Args:
        url: the file's URL.
        promise: what the file should be.
        digest: makes an empty hash object.
        write: called with each piece and its position in bytes, which begins at 0 again with each transfer.
        cancelled: polled ten times a second while this waits.

    Raises:
        WrongContentError: the size is not the promised one, or the digest is wrong three times.
        OSError, StorageError, CancelledError: as `RemoteFile` does; also whatever `write` raises.
    """

    def transfer() -> None:
        source = RemoteFile(url, cancelled)
        size = source.size()
        if size is not None and size != promise.bytes:
            raise WrongContentError(
                f"{url}: damaged, or another file: {size:,} bytes; {promise.by} says {promise.bytes:,}"
            )
        found, position = digest(), 0
        for piece in source.pieces(promise.bytes):
            found.update(piece)
            write(piece, position)
            position += len(piece)
        if found.hexdigest() != promise.digest:
            raise _WrongDigestError(
                f"{url}: damaged, or another file: in {len(PAUSES) + 1} transfers its {promise.digest_name} was not "
                f"{promise.digest}, as {promise.by} says, but {found.hexdigest()}"
            )

    with_pauses(transfer, _WrongDigestError, lambda seconds: pause(seconds, cancelled))


def with_pauses(
    act: Callable[[], Result], again: type[Exception], sleep: Callable[[float], None] = time.sleep
) -> Result:
    """Call `act` up to three times, as long as it raises `again`, with pauses in between; returns its result."""
    for seconds in PAUSES:
        with suppress(again):
            return act()
        sleep(seconds)
    return act()
