"""Evaluators: one contract, run during training by schedule or on their own."""

from vitscale.evaluation.build import build_evaluators, check_class_names
from vitscale.evaluation.contract import Evaluator, ModelOutputs, Predict, evaluate

__all__ = ["Evaluator", "ModelOutputs", "Predict", "build_evaluators", "check_class_names", "evaluate"]
