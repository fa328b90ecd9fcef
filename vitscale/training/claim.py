"""This launch's claim on its run directory, so that no second launch writes there."""

import contextlib
from pathlib import Path

from vitscale.errors import VitscaleError
from vitscale.ranks import write_on_rank_zero
from vitscale.recipe import Recipe
from vitscale.runs import directory as run_directory
from vitscale.runs.names import RECIPE_FILE


class Claim:
    """Held from here until `close`; rank 0 holds it for all ranks, which make it together.

    Raises `RecipeError` where another launch has the directory.
    """

    def __init__(self, run_dir: Path, recipe: Recipe) -> None:
        self._run_dir, self._recipe = run_dir, recipe
        self._held: contextlib.ExitStack | None = None
        write_on_rank_zero(self._take, run_dir)

    def _take(self) -> None:
        self._held = run_directory.claim(self._run_dir, self._recipe)

    def renew(self) -> bool:
        """Make the directory whole again where it was moved or deleted: the repeated command finds a run in it.

        Of rank 0 alone. Returns whether there was need.
        """
        if (self._run_dir / RECIPE_FILE).exists():
            return False
        self.close()
        with contextlib.suppress(OSError, VitscaleError):  # what is to be saved will tell
            self._take()
            return True
        return False

    def close(self) -> None:
        """Let others have it."""
        if self._held is not None:
            self._held.close()
