"""Shards -> batches: the order, the augmentation and the loader."""

from vitscale.data.augmentation import EvalTransform, TrainTransform
from vitscale.data.device import to_model_input
from vitscale.data.loader import Batch, Loader
from vitscale.data.order import ORDER_VERSION, EvalOrder, TrainOrder

__all__ = [
    "ORDER_VERSION",
    "Batch",
    "EvalOrder",
    "EvalTransform",
    "Loader",
    "TrainOrder",
    "TrainTransform",
    "to_model_input",
]
