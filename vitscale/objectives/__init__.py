"""Objectives: logits and labels -> one loss a sample. The trainer divides by the global weight."""

from vitscale.objectives.classification import Classification, sigmoid_cross_entropy, softmax_cross_entropy

__all__ = ["Classification", "sigmoid_cross_entropy", "softmax_cross_entropy"]
