"""Checkpoints as sets of parameter fragments. Knows nothing of DeepSpeed."""

from vitscale.runs.checkpoint.background import BackgroundSaver, SaveOutcome
from vitscale.runs.checkpoint.directory import Directory, LocalDirectory, RemoteDirectory, checkpoint_directory
from vitscale.runs.checkpoint.format import Fragment, bytes_needed
from vitscale.runs.checkpoint.store import CheckpointReader, CheckpointStore, Gather
from vitscale.runs.checkpoint_index import EMA, MASTER, CheckpointIndex, average_kind, is_weights, weight_kinds
