"""Evaluators, all under one contract, run during training on a schedule or by commands of their own."""

from vitscale.evaluation.build import build_evaluators
from vitscale.evaluation.classification import Validation
from vitscale.evaluation.contract import Evaluator, Loaders, MakeLoader, Predict, evaluate
from vitscale.evaluation.fewshot import PAPER_L2S, FewShot, NearestNeighbours, SharedL2FewShot
