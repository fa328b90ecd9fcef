"""What runs the entries of a study: the contract of its engines."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from vitscale.launch import Pretraining

LOG_FILE = "launch.log"
"""The file in a run directory that takes what an entry's launch prints."""


class Engine(Protocol):
    """Starts launches and reports their ends. A launch goes by the name of its run directory."""

    @property
    def running(self) -> Collection[str]:
        """The names of launches under way, those of an earlier process included."""
        ...

    @property
    def room(self) -> int:
        """The number of further launches that it would start now."""
        ...

    def start(self, works: Sequence[Pretraining]) -> None:
        """Start or submit these launches, no more than there is room for. Raises `VitscaleError`."""
        ...

    def ended(self) -> Mapping[str, int]:
        """Name -> exit code of each launch that has ended since the last call."""
        ...

    def tell_to_end(self) -> None:
        """Have all launches save and end."""
        ...

    def kill(self) -> None:
        """End all launches at once."""
        ...
