"""Errors that people cause and people read, each with the exit code that schedulers see.

An error raised here ends the command with one readable message and no stack trace. The message says what was wrong,
where, what was expected and what to do. Everything else is a bug and keeps its trace (exit code 1).
"""

import numbers
from collections import abc
from contextlib import contextmanager
from typing import Self

from vitscale.ground.safe_text import shown

EXIT_DONE, EXIT_INTERRUPTED = 0, 130  # the second of Ctrl-C, where nothing is to be saved


class VitscaleError(Exception):
    """Base of the errors below; `exit_code` is the process's exit code."""

    exit_code = 1
    is_on_all_ranks = False

    def __str__(self) -> str:
        return shown(super().__str__())

    def on_all_ranks(self) -> Self:
        """Mark an error that every rank of a run raises alike, so that one of them may report it for all."""
        self.is_on_all_ranks = True
        return self

    def with_code(self, exit_code: int) -> Self:
        """Give an error the exit code of what has ended elsewhere, because of which this process ends, too."""
        self.exit_code = exit_code
        return self


def as_plain(error: VitscaleError) -> list[str]:
    """An error's class, the nearest one of this module, and its message, for `from_plain` on other ranks."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
    return [kind, Exception.__str__(error)]


def from_plain(name: str, message: str) -> VitscaleError:
    """The error of `as_plain`; of the base class if there is none of that name."""
    kind = globals().get(name)
    return kind(message) if isinstance(kind, type) and issubclass(kind, VitscaleError) else VitscaleError(message)


class RecipeError(VitscaleError):
    """A recipe, a command line or an environment that cannot be run as written."""

    exit_code = 2


def check_numbers(least: int, **arguments: object) -> None:
    """Raise `RecipeError` for an argument that is given, so is not None, and no whole number from `least` to 2**63."""
    for name, value in arguments.items():
        if value is not None and not (isinstance(value, numbers.Integral) and least <= int(value) < 2**63):
            raise RecipeError(f"{name}={value!r}: expected a number from {least}")


class MachineError(RecipeError):
    """Something that this machine lacks, or has in a state in which nothing can run."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n(`vitscale doctor` says what else this machine lacks)"


class OutOfMemoryError(RecipeError):
    """A recipe that needs more memory than a device has."""


class DataError(VitscaleError):
    """A dataset, shard or sample that is missing, damaged or of the wrong shape."""

    exit_code = 3


class NonFiniteError(VitscaleError):
    """A loss or gradient that is NaN or infinite, or a loss that jumps."""

    exit_code = 4


class ProofError(VitscaleError):
    """Updates that differ from those that plain torch makes of the same batches."""

    exit_code = 4


class PeerLostError(VitscaleError):
    """Another rank has ended or stopped responding; repeating the command continues from the last checkpoint."""

    exit_code = 75


class ReplicaError(VitscaleError):
    """Ranks that should hold or compute the same bits differ; repeating the command goes back to a checkpoint."""

    exit_code = 75


class AuditError(VitscaleError):
    """An update that does not follow from its batch; repeating the command goes back to a checkpoint."""

    exit_code = 75


class PreemptedError(VitscaleError):
    """The run was told to end before it was done, by a signal or a time limit, and has saved."""

    exit_code = 85


class StorageError(VitscaleError):
    """A remote place that does not answer; repeating the command later may help."""

    exit_code = 75


class CheckpointError(VitscaleError):
    """A checkpoint that is missing, damaged or of another model. Data on disk, hence the same code as `DataError`."""

    exit_code = 3


@contextmanager
def turned(what: str, kind: type[Exception], *types: type[Exception]) -> abc.Iterator[None]:
    """Turns errors of some types into one of a kind: `what`, and what they say."""
    try:
        yield
    except types as error:
        raise kind(f"{what}: {error}") from None


@contextmanager
def os_errors(what: str, kind: type[VitscaleError] = DataError) -> abc.Iterator[None]:
    """Turns an OSError into an error for people: `what`, such as `FILE: cannot be read`, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what} ({error.strerror or error})") from error
