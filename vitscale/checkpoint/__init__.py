"""Checkpoints as sets of parameter fragments. Knows nothing of DeepSpeed."""

from vitscale.checkpoint.background import BackgroundSaver, Outcome
from vitscale.checkpoint.directory import Directory, LocalDirectory, RemoteDirectory, checkpoint_directory
from vitscale.checkpoint.format import Fragment, bytes_needed
from vitscale.checkpoint.reader import CheckpointReader
from vitscale.checkpoint.store import CheckpointStore, Gather
from vitscale.runs.checkpoint_index import EMA, MASTER, CheckpointIndex

__all__ = [
    "EMA",
    "MASTER",
    "BackgroundSaver",
    "CheckpointIndex",
    "CheckpointReader",
    "CheckpointStore",
    "Directory",
    "Fragment",
    "Gather",
    "LocalDirectory",
    "Outcome",
    "RemoteDirectory",
    "bytes_needed",
    "checkpoint_directory",
]
