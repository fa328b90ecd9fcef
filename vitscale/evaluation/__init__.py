"""Evaluators, all under one contract, run during training on a schedule or by commands of their own."""

from vitscale.evaluation.build import build_evaluators, check_class_names
from vitscale.evaluation.classification import Validation
from vitscale.evaluation.contract import Evaluator, Loaders, MakeLoader, Predict, evaluate
from vitscale.evaluation.fewshot import PAPER_L2S, FewShot, SharedL2FewShot
from vitscale.evaluation.knn import NearestNeighbours

__all__ = [
    "PAPER_L2S",
    "Evaluator",
    "FewShot",
    "Loaders",
    "MakeLoader",
    "NearestNeighbours",
    "Predict",
    "SharedL2FewShot",
    "Validation",
    "build_evaluators",
    "check_class_names",
    "evaluate",
]
