"""How ranks ended, what each exit means, and which exit caused the others."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from vitscale.ground.errors import EXIT_DONE, DataError, NonFiniteError, PeerLostError, PreemptedError, RecipeError
from vitscale.ground.safe_text import printable

EXIT_BUG, EXIT_RECIPE, EXIT_DATA = 1, RecipeError.exit_code, DataError.exit_code
EXIT_NON_FINITE, EXIT_RETRY = NonFiniteError.exit_code, PeerLostError.exit_code
EXIT_PREEMPTED = PreemptedError.exit_code
FINAL = (EXIT_RECIPE, EXIT_DATA, EXIT_NON_FINITE)  # exit codes of what repeating the command does not mend

_MEANINGS = {
    EXIT_DONE: "done",
    EXIT_BUG: "an unexpected error, its trace is above",
    EXIT_RECIPE: "recipe, command line or environment",
    EXIT_DATA: "data or checkpoint",
    EXIT_NON_FINITE: "loss or gradient not finite",
    EXIT_RETRY: "to be repeated",
    EXIT_PREEMPTED: "told to end",
}

# What another node may send of each kind. Its words are shown on one line, without what controls a terminal.
Words = Annotated[str, AfterValidator(lambda text: printable(" ".join(text.split()))[:2000])]
Code = Annotated[int, AfterValidator(lambda code: code if code in _MEANINGS else EXIT_RETRY)]
Count = Annotated[int, Field(ge=0, lt=2**53)]


@dataclass(frozen=True)
class End:
    """The end of one rank; `step` and `where` come from its last heartbeat."""

    rank: Count
    pid: Count
    returncode: Annotated[int, Field(ge=-64, le=255)]  # negative for a signal
    step: Count | None
    where: Words
    was_told: bool = False  # it died of the signal that was passed on to it, as it does while there is nothing to save
    was_killed: bool = False  # by the supervisor
    hung: Words = ""  # how it gave no sign of life before
    why: Words = ""  # the message of the error that it ended with, if it has told

    @property
    def is_done(self) -> bool:
        """Whether the rank says that its work is done."""
        return self.returncode == EXIT_DONE

    @property
    def is_bad(self) -> bool:
        """Whether something went wrong with this rank, or with one that it depends on; not if it was told to end."""
        return not (self.is_done or self.was_told or self.returncode == EXIT_PREEMPTED)

    @property
    def is_consequence(self) -> bool:
        """Whether a bad end may follow from that of another rank."""
        return _distance(self) > 1

    @property
    def code(self) -> int:
        """A launch's exit code if it ends for this reason: a signal is worth a repetition, an unknown code a bug."""
        known = self.returncode in _MEANINGS
        return EXIT_RETRY if self.returncode < 0 else self.returncode if known else EXIT_BUG

    def describe(self) -> str:
        """Which rank ended, how, and where in training, in words."""
        how = self.hung or f"ended with exit code {self.returncode} ({_MEANINGS.get(self.returncode, 'unknown')})"
        if self.returncode < 0 and not self.hung:
            name = signal_name(-self.returncode)
            how = f"was killed by the launch ({name})" if self.was_killed else f"was killed by {name}"
        return f"rank {self.rank} (pid {self.pid}) {how} {self.where}"


def signal_name(number: int) -> str:
    """The signal's name, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


def cause(ends: Sequence[End]) -> End | None:
    """The exit that caused the others, or None if no rank ended badly.

    A rank that loses another one ends with 75 or has to be killed: both are consequences if there is any other bad end.
    """
    return min((end for end in ends if end.is_bad), key=_distance, default=None)


def _distance(end: End) -> int:
    """How far an end is from the cause: 0 for a cause in itself, more for what may follow from one."""
    if end.hung:
        return 1
    return 3 if end.was_killed else 2 if end.returncode == EXIT_RETRY else 0
