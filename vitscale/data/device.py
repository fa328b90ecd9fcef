"""Copies batches to the device ahead of their use, and turns uint8 pixels into the model's input."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from vitscale.data.batch import Batch
from vitscale.data.loader import Loader
from vitscale.recipe import Normalise

_PAPERS = Normalise()


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


def on_device(loader: Loader, device: torch.device) -> Iterator[Batch]:
    """The loader's batches with their images on the device; the rest stays in host memory.

    On CUDA a separate stream copies the next batch, if it is ready, while the device works on this one; with the one
    that the consumer still holds, up to three batches are on the device. Batches must be in pinned memory
    (`Reading.pinned`).
    """
    if device.type != "cuda":
        yield from loader
        return
    copying = torch.cuda.Stream(device)
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    while True:
        if ahead is None:
            batch = next(loader, None)
            if batch is None:
                return
            ahead = _copied(batch, device, copying)
        moved, arrived = ahead
        batch = loader.next_if_ready()
        ahead = None if batch is None else _copied(batch, device, copying)
        current = torch.cuda.current_stream(device)
        current.wait_event(arrived)
        moved.images.record_stream(current)  # the images were allocated on another stream
        yield moved


def _copied(batch: Batch, device: torch.device, stream: torch.cuda.Stream) -> tuple[Batch, torch.cuda.Event]:
    with torch.cuda.stream(stream):
        moved = replace(batch, images=batch.images.to(device, non_blocking=True))
        arrived = torch.cuda.Event()
        arrived.record(stream)
    return moved, arrived
