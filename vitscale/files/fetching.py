"""Fetching a file from a URL until its digest is right.

What a network does now and then is repeated by `vitscale.storage`. This is for what came without an error and is wrong
all the same: a damaged transfer, or a file that somebody is just replacing.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from vitscale.storage import RemoteFile, never, pause

PAUSES = (0.5, 2.0)  # seconds before the second and third try

Result = TypeVar("Result")


class Digest(Protocol):
    """An object of hashlib's or xxhash's."""

    def update(self, data: bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class Promise:
    """What a file should be: its size in bytes, its digest under the digest's name, and which file says so."""

    bytes: int
    digest_name: str
    digest: str
    by: str


class WrongContentError(Exception):
    """What came is not what was promised; the message says where and how."""


class _WrongDigestError(WrongContentError):
    """The same, perhaps only this time."""


def fetch(
    url: str,
    promise: Promise,
    digest: Callable[[], Digest],
    write: Callable[[bytes, int], object],
    cancelled: Callable[[], bool] = never,
) -> None:
    """Bring a file here, with up to three transfers of which the last one is right.

    Args:
        url: of the file.
        promise: what it should be.
        digest: makes an empty digest.
        write: takes each piece and its position, which begins at 0 again with each transfer.
        cancelled: asked ten times a second while this waits.

    Raises:
        WrongContentError: the size, or three times the digest, is not the one promised.
        OSError, StorageError, CancelledError: as `RemoteFile`; also what `write` raises.
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
    """What `act` returns, tried up to three times while it raises `again`."""
    for seconds in PAUSES:
        with suppress(again):
            return act()
        sleep(seconds)
    return act()
