"""Shards -> batches: the order, the augmentation and the loader."""

from vitscale.data.augmentation import EvalTransform, ResizeTransform, TrainTransform, train_transform
from vitscale.data.batch import Batch
from vitscale.data.device import on_device, to_model_input
from vitscale.data.image_operations import ImageOperation, TrainingInput
from vitscale.data.loader import Loader
from vitscale.data.order import ORDER_VERSION, EvalOrder, TrainOrder
from vitscale.data.settings import Reading
from vitscale.data.training import training_loader, training_order

__all__ = [
    "ORDER_VERSION",
    "Batch",
    "EvalOrder",
    "EvalTransform",
    "ImageOperation",
    "Loader",
    "Reading",
    "ResizeTransform",
    "TrainOrder",
    "TrainTransform",
    "TrainingInput",
    "on_device",
    "to_model_input",
    "train_transform",
    "training_loader",
    "training_order",
]
