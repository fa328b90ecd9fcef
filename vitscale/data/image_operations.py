"""From a batch's uint8 images to the model's input in training: operations on the device, and normalisation."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vitscale.data.draws import operation_keys
from vitscale.ground.errors import RecipeError
from vitscale.ground.extensions import implementation
from vitscale.recipe import LoaderOperation, Normalise, Recipe

_PAPERS = Normalise()


class ImageOperation:
    """The contract of an operation on training images: a function of (images, keys) and of nothing else.

    The result for a sample depends on its own pixels and key only, so it is the same for any number of ranks and after
    resuming.
    """

    @classmethod
    def of(cls, block: Any) -> Self:
        """The operation that a block of `data.operations` describes."""
        raise NotImplementedError

    def __call__(self, images: Tensor, keys: np.ndarray) -> Tensor:
        """The changed images, of the same shape and dtype.

        Args:
            images: (B, S, S, 3) on the device: uint8, or fp32 and normalised, as the block's `pixels` says.
            keys: uint64 (B,) on the host, the bits of each sample's randomness in this epoch for this operation.
        """
        raise NotImplementedError


_Operation = tuple[Any, ImageOperation, int]  # its block, what computes it, and its place in the list of operations


def to_model_input(images: Tensor, device: torch.device, dtype: torch.dtype, normalise: Normalise = _PAPERS) -> Tensor:
    """Images, uint8 (B, H, W, 3), moved to the device and normalised there in fp32; the result is in `dtype`.

    The default normalisation is x / 127.5 - 1, in [-1, 1].
    """
    pixels = images.to(device).to(torch.float32)
    if (normalise.mean, normalise.std) == (_PAPERS.mean, _PAPERS.std):
        return pixels.div_(127.5).sub_(1.0).to(dtype)
    pixels.div_(255.0)
    # Numbers on the host: a tensor of three would have to be copied to the device, and the host would wait for that.
    for channel, mean, std in zip(pixels.unbind(dim=-1), normalise.mean, normalise.std, strict=True):
        channel.sub_(mean).div_(std)
    return pixels.to(dtype)


class TrainingInput:
    """Turns uint8 views into the model's input, as a recipe says; `normalise` is equivalent to `to_model_input`.

    Raises RecipeError for an operation that is not available.
    """

    def __init__(self, recipe: Recipe, normalise: Callable[..., Tensor] = to_model_input) -> None:
        # By kind of views, those that the loader has not applied already.
        self._operations: list[list[_Operation]] = [
            [
                (block, implementation(block.implementation, ImageOperation).of(block), index)
                for index, block in enumerate(view.operations)
                if not isinstance(block, LoaderOperation)
            ]
            for view, _ in recipe.data.training_views()
        ]
        self._normalise = partial(normalise, normalise=recipe.data.normalise)

    def __call__(self, images: Tensor, keys: Tensor, device: torch.device, dtype: torch.dtype, kind: int = 0) -> Tensor:
        """The model's input (B, S, S, 3) in `dtype`, of uint8 images on any device and their keys (B,) on the host.

        `kind` is the place of their view's kind in `data.views`.
        """
        operations = self._operations[kind]
        after = [each for each in operations if each[0].pixels == "float"]
        images = _operated([each for each in operations if each[0].pixels == "uint8"], images.to(device), keys)
        images = self._normalise(images, device, torch.float32 if after else dtype)
        return _operated(after, images, keys).to(dtype)

    def of_views(
        self,
        views: Sequence[Tensor],
        keys: Sequence[Tensor],
        device: torch.device,
        dtype: torch.dtype,
        kinds: Sequence[int] | None = None,
    ) -> tuple[Tensor, ...]:
        """The same for some kinds of views or all, (B, n, S, S, 3) each, and their keys (B, n)."""
        return tuple(
            self(views[kind].flatten(0, 1), keys[kind].flatten(), device, dtype, kind).unflatten(0, keys[kind].shape)
            for kind in (range(len(views)) if kinds is None else kinds)
        )


def _operated(operations: list[_Operation], images: Tensor, keys: Tensor) -> Tensor:
    for block, operation, index in operations:
        result = operation(images, operation_keys(keys.numpy().view(np.uint64), index))
        if (result.shape, result.dtype) != (images.shape, images.dtype):
            raise RecipeError(
                f"data.operations: {block.kind} made {tuple(result.shape)} {result.dtype} of "
                f"{tuple(images.shape)} {images.dtype}; expected the same shape and dtype"
            )
        images = result
    return images
