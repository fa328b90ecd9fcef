"""Checkpoints as sets of parameter fragments. Knows nothing of DeepSpeed."""

from vitscale.checkpoint.background import BackgroundSaver, Outcome
from vitscale.checkpoint.format import Fragment, bytes_needed
from vitscale.checkpoint.place import LocalPlace, Place, RemotePlace, checkpoint_place
from vitscale.checkpoint.reader import CheckpointReader
from vitscale.checkpoint.store import CheckpointStore, Gather
from vitscale.runs.index import EMA, MASTER, Index

__all__ = [
    "EMA",
    "MASTER",
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
]
