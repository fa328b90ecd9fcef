"""This launch's claim on its run directory, so that no second launch writes there."""

import contextlib
from pathlib import Path

from vitscale.ground.errors import VitscaleError
from vitscale.ground.ranks import write_on_rank_zero
from vitscale.recipe import Recipe
from vitscale.runs import directory as run_directory
from vitscale.runs.names import RECIPE_FILE


class Claim:
    """The claim, held until `close` by rank 0 for all ranks, which make it together.

    Raises `RecipeError` if another launch has the directory.
    """

    def __init__(self, run_dir: Path, recipe: Recipe) -> None:
        self._run_dir, self._recipe = run_dir, recipe
        self._held: contextlib.ExitStack | None = None
        write_on_rank_zero(self._take, run_dir)

    def _take(self) -> None:
        self._held = run_directory.claim(self._run_dir, self._recipe)

    def renew(self) -> bool:
        """Restore the directory if it was moved or deleted, so that the repeated command finds a run in it.

        Called on rank 0 only. Returns whether it was restored.
        """
        if (self._run_dir / RECIPE_FILE).exists():
            return False
        self.close()
        with contextlib.suppress(OSError, VitscaleError):  # the next save will report it
            self._take()
            return True
        return False

    def close(self) -> None:
        """Release the claim."""
        if self._held is not None:
            self._held.close()
