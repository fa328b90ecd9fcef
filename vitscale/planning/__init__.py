"""Predicts what a recipe will need on given hardware, before anything runs."""

from vitscale.planning.memory import Memory, expected_memory, largest_micro_batch
from vitscale.planning.tensors import StepTensors, step_tensors

__all__ = ["Memory", "StepTensors", "expected_memory", "largest_micro_batch", "step_tensors"]
