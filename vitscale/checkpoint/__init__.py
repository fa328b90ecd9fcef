"""Checkpoints as sets of parameter fragments. Knows nothing of DeepSpeed."""

from vitscale.checkpoint.background import BackgroundSaver, Outcome
from vitscale.checkpoint.format import EMA, MASTER, Fragment, Index, bytes_needed
from vitscale.checkpoint.place import LocalPlace, Place, RemotePlace, checkpoint_place
from vitscale.checkpoint.reader import CheckpointReader
from vitscale.checkpoint.store import CheckpointStore, Gather
from vitscale.run_directory import CHECKPOINTS, DONE_FILE, RECIPE_FILE, step_folder

__all__ = [
    "CHECKPOINTS",
    "DONE_FILE",
    "EMA",
    "MASTER",
    "RECIPE_FILE",
    "BackgroundSaver",
    "CheckpointReader",
    "CheckpointStore",
    "Fragment",
    "Gather",
    "Index",
    "LocalPlace",
    "Outcome",
    "Place",
    "RemotePlace",
    "bytes_needed",
    "checkpoint_place",
    "step_folder",
]
