"""Checkpoints as sets of parameter fragments. Knows nothing of DeepSpeed."""

from vitscale.checkpoint.format import MASTER, Fragment, Index, step_folder
from vitscale.checkpoint.reader import CheckpointReader
from vitscale.checkpoint.store import CheckpointStore

__all__ = ["MASTER", "CheckpointReader", "CheckpointStore", "Fragment", "Index", "step_folder"]
