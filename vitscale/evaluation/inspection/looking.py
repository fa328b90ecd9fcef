"""Inspects a model, or a finished one of any source, while it sees pictures: one pass, for all figures.

Shape legend: n images, k pictures that figures show, S side in pixels, A heads, T tokens, N patches, D width.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vitscale.data.shards import MANIFEST_NAME
from vitscale.evaluation.finished import FinishedModel
from vitscale.evaluation.inspection.attention import POOLING, AttentionMeter, Reach, watching
from vitscale.evaluation.inspection.representation import (
    SMALLEST_BATCH,
    Components,
    colours,
    filter_components,
    gram,
    similarity,
)
from vitscale.evaluation.prediction import image_files, pictures_of
from vitscale.ground.errors import DataError, RecipeError
from vitscale.models import Model, Outputs

Part = Literal["filters", "positions", "attention", "rollout", "alignment", "norms", "colours"]
PARTS: tuple[Part, ...] = get_args(Part)
BATCH = 8  # with ViT-H/14 at 518 pixels, 16 took 6.03 GB of memory
"""The number of images forwarded at once. It is also the alignment's minibatch, hence the same for all models."""


@dataclass
class Findings:
    """The results of inspecting one model. What was not inspected is empty or None.

    Attributes:
        title: the model's name.
        image_size: side S of the input in pixels.
        grid: the number of patches along one side; None if the model has no grid.
        stride: pixels from one patch to the next.
        images: the number of images seen.
        parts: what was inspected.
        pictures: the first images as the model sees them, uint8 (k, S, S, 3).
        components: principal components of the filters.
        similarities: where positions are added -> the cosine similarity of their embeddings, (N, N).
        reach: layer -> how far its heads look, (n, A).
        maps, rollout: as in `AttentionMeter`, of all batches together, (k, N).
        norms: layer -> norms of the patches' tokens (n, N), or of all positions of a feature map.
        first_norms: layer -> norms of the first token (n,), if any tokens come before the patches.
        grams: layer -> the Gram matrix of each minibatch.
        colours: the patches as colours, (k, N, 3).
        shares: the share of the variance along each of the three colours, (3,).
    """

    title: str
    image_size: int
    grid: int | None
    stride: int
    images: int
    parts: Sequence[Part]
    pictures: Tensor
    components: Components | None = None
    similarities: dict[str, Tensor] = field(default_factory=dict)
    reach: dict[str, Reach] = field(default_factory=dict)
    maps: dict[str, Tensor] = field(default_factory=dict)
    rollout: Tensor | None = None
    norms: dict[str, Tensor] = field(default_factory=dict)
    first_norms: dict[str, Tensor] = field(default_factory=dict)
    grams: dict[str, list[Tensor]] = field(default_factory=dict)
    colours: Tensor | None = None
    shares: Tensor | None = None


def parts_of(model: Model, title: str, wanted: Sequence[Part] | None) -> list[Part]:
    """The parts of a model to inspect: the wanted ones, or all that it has. Raises `RecipeError` if one is missing."""
    if unknown := [part for part in wanted or () if part not in PARTS]:
        raise RecipeError(f"--show: {unknown[0]!r} is none; expected some of {','.join(PARTS)}")
    anatomy = model.anatomy()
    missing: dict[Part, str] = {}
    if not anatomy.attention:
        missing["attention"] = missing["rollout"] = "has no attention between patches"
    elif any(layer.windows is not None for layer in anatomy.attention):
        missing["rollout"] = "attends within windows of maps that shrink from stage to stage: layers have no product"
    if not model.positions():
        missing["positions"] = "has no position embeddings: nothing is added to its tokens"
    if not anatomy.embedding:
        missing["filters"] = "does not say where its filters are"
    if anatomy.grid is None:
        missing["colours"] = missing["norms"] = "does not say where its patches are"
    for part in wanted or ():
        if part in missing:
            raise RecipeError(
                f"--show {part}: {title} {missing[part]}; it has {', '.join(p for p in PARTS if p not in missing)}"
            )
    return [part for part in PARTS if part in (wanted or PARTS) and part not in missing]


@torch.no_grad()
def look(
    model: Model,
    predict: Callable[[Tensor], Outputs],
    images: Tensor,
    title: str,
    parts: Sequence[Part],
    *,
    pictures: int = 6,
    batch: int = BATCH,
    seen: Callable[[int], None] = lambda count: None,
) -> Findings:
    """Show images to a model and measure what happens inside.

    Args:
        model: the model that `predict` runs on images; its embedding's parameters must be readable.
        images: uint8 (n, S, S, 3).
        pictures: the number of images, the first ones, of which maps and colours are made.
        batch: the number of images forwarded at once.
        seen: called with the number of images done so far.
    """
    anatomy = model.anatomy()
    found = Findings(title, images.shape[1], anatomy.grid, anatomy.stride, len(images), parts, images[:pictures])
    if "filters" in parts and (filters := model.filters()) is not None:
        found.components = filter_components(filters)
    if "positions" in parts:
        found.similarities = {where: similarity(values) for where, values in model.positions().items()}
    if not set(parts) - {"filters", "positions"}:
        return found
    has_windows = any(layer.windows is not None for layer in anatomy.attention)
    mapped = "attention" if has_windows else "rollout"  # the part that maps belong to
    meter = AttentionMeter(anatomy, pictures if mapped in parts else 0)
    norms: dict[str, list[Tensor]] = {}

    def observe_layer(name: str, module: Any, inputs: Any, output: Tensor) -> None:
        if "alignment" in parts and len(output) >= SMALLEST_BATCH:
            found.grams.setdefault(name, []).append(gram(output))
        if "norms" in parts:
            axis = anatomy.channels if output.dim() == 4 else -1
            norms.setdefault(name, []).append(output.float().norm(dim=axis).flatten(1).cpu())

    shown: list[Tensor] = []
    with ExitStack() as stack:
        for name, module in anatomy.layers.items():
            stack.callback(module.register_forward_hook(partial(observe_layer, name)).remove)
        if {"attention", "rollout"} & set(parts):
            watched = {layer.module: layer.name for layer in anatomy.attention}
            watched |= {anatomy.pooling: POOLING} if anatomy.pooling is not None else {}
            stack.enter_context(watching(watched, meter.observe))
        for first in range(0, len(images), batch):
            part = images[first : first + batch]
            meter.begin(len(part))
            outputs = predict(part)
            meter.end()
            if first < pictures:
                shown.append(outputs.tokens[: min(len(part), pictures - first)].float().cpu())
            seen(first + len(part))
    if "attention" in parts:
        for name, batches in meter.reach.items():
            columns = zip(*(vars(each).values() for each in batches), strict=True)
            found.reach[name] = Reach(*map(torch.cat, columns))
    found.maps = {name: torch.cat(values) for name, values in meter.maps.items()}
    if "rollout" in parts:
        found.rollout = torch.cat(meter.rollout)
    for name, values in norms.items():
        of_tokens = torch.cat(values)
        before = anatomy.before if of_tokens.shape[1] == anatomy.before + (anatomy.grid or 0) ** 2 else 0
        found.norms[name] = of_tokens[:, before:]
        if before:
            found.first_norms[name] = of_tokens[:, 0]
    if "colours" in parts and anatomy.grid is not None:
        found.colours, found.shares = colours(torch.cat(shown)[:, -(anatomy.grid**2) :])
    return found


def pictures_from(model: FinishedModel, where: str, count: int) -> Tensor:
    """`count` images, uint8 (n, S, S, 3): spread over a folder, or a dataset's first. Raises as `first_of`."""
    path = Path(where)
    if not path.is_file() and (not path.is_dir() or (path / MANIFEST_NAME).exists()):
        return first_of(model, where, count)
    files = image_files([path])
    files = [files[at * len(files) // count] for at in range(count)] if len(files) > count else files
    return pictures_of(model, files)


def first_of(model: FinishedModel, dataset: str, count: int) -> Tensor:
    """The first `count` pictures of a dataset, whose stored order is shuffled. Raises `RecipeError` and `DataError`."""
    manifest = model.dataset(dataset)
    images: list[Tensor] = []
    with closing(model.loader(manifest)()) as loader:  # type: ignore[type-var]
        for batch in loader:
            images.append(batch.images[batch.mask].clone())
            if sum(map(len, images)) >= count:
                break
    if not sum(map(len, images)):
        raise DataError(f"{manifest.where}: no picture in it can be read")
    return torch.cat(images)[:count]


def inspect_model(
    model: FinishedModel,
    images: Tensor,
    wanted: Sequence[Part] | None = None,
    *,
    pictures: int = 6,
    seen: Callable[[int], None] = lambda count: None,
) -> Findings:
    """Inspect a model while it sees images, uint8 (n, S, S, 3).

    Args:
        wanted: what to inspect; by default all that the model has.
        pictures: the number of images, the first ones, for which maps and colours are made.
        seen: called with the number of images done so far.

    Raises `RecipeError` for parts that the model does not have, and under several processes.
    """
    if model.accelerator.num_processes > 1:
        raise RecipeError("inspection is one process: start it without torchrun").on_all_ranks()
    backbone = model.backbone
    with model.reading(backbone.anatomy().embedding):
        parts = parts_of(backbone, model.title, wanted)
        return look(backbone, model.predict, images, model.title, parts, pictures=pictures, seen=seen)
