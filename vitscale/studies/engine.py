"""What runs the entries of a study: the contract of its engines."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from vitscale.launch import Pretraining

LOG_FILE = "launch.log"
"""In a run directory: what the launch of an entry prints."""


class Engine(Protocol):
    """Starts launches and tells of their ends. A work's name is that of its run directory."""

    @property
    def running(self) -> Collection[str]:
        """The launches that it has, those of an earlier process included."""
        ...

    @property
    def room(self) -> int:
        """How many more it would start now."""
        ...

    def start(self, works: Sequence[Pretraining]) -> None:
        """Start, or hand in, as many as there is room for. Raises `VitscaleError`."""
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
