"""Checkpoints as sets of parameter fragments. Knows nothing of DeepSpeed."""

from vitscale.checkpoint.format import MASTER, Fragment, Index, step_folder
from vitscale.checkpoint.reader import CheckpointReader
from vitscale.checkpoint.store import CheckpointStore
from vitscale.run_directory import CHECKPOINTS, DONE_FILE, RECIPE_FILE

__all__ = [
    "CHECKPOINTS",
    "DONE_FILE",
    "MASTER",
    "RECIPE_FILE",
    "CheckpointReader",
    "CheckpointStore",
    "Fragment",
    "Index",
    "step_folder",
]
