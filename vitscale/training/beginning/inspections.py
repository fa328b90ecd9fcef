"""Looks inside the model while it trains (`evaluation.inspect`); the figures go to the trackers.

Each rank looks at its part of the pictures, the same ones each time; rank 0 draws.
"""

import contextlib
import io
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitscale.evaluation import MakeLoader
from vitscale.evaluation.contract import Predict
from vitscale.evaluation.inspection.attention import Reach
from vitscale.evaluation.inspection.figures import inspection_figures
from vitscale.evaluation.inspection.looking import BATCH, Findings, Part, look
from vitscale.ground.page import standalone
from vitscale.ground.ranks import gather_rows
from vitscale.models import Model

Pictures = Mapping[str, np.ndarray]
"""What trackers show: name -> uint8 (height, width, 3)."""


class Inspections:
    """Draws figures of a model from the findings of all ranks, each on its own part of the pictures.

    Args:
        make_loader: opens a loader of this rank's part of the dataset.
        batches: the number of its batches that are looked at, the same on all ranks.
    """

    def __init__(self, make_loader: MakeLoader, batches: int) -> None:
        self._make_loader, self._batches = make_loader, batches
        self._seen: tuple[Tensor, Tensor] | None = None

    def draw(self, model: Model, predict: Predict, embedding: contextlib.AbstractContextManager) -> Pictures:
        """The figures, on rank 0; none elsewhere. All ranks call it together.

        Args:
            predict: predicts from images; all ranks call it together.
            embedding: a context in which the parameters of the model's embedding are whole.
        """
        images, mask = self._pictures()
        anatomy = model.anatomy()
        parts: list[Part] = ["filters"] if anatomy.embedding else []
        parts += ["norms"] if anatomy.grid is not None else []
        parts += ["attention"] if anatomy.attention else []
        with embedding:
            findings = look(model, predict, images, "", parts, pictures=0, batch=BATCH)
        gathered = _gathered(findings, mask, next(model.parameters()).device)
        return {} if gathered is None else _drawn(gathered)

    def _pictures(self) -> tuple[Tensor, Tensor]:
        """Images uint8 (n, S, S, 3), equally many on all ranks, and a mask (n,) that is False for padding."""
        if self._seen is None:
            loader: Any = self._make_loader()
            with contextlib.closing(loader):
                batches = [(batch.images.clone(), batch.mask.clone()) for batch in islice(loader, self._batches)]
            images, masks = zip(*batches, strict=True)
            self._seen = torch.cat(images), torch.cat(masks)
        return self._seen


def _gathered(local: Findings, mask: Tensor, device: torch.device) -> Findings | None:
    """The findings of all ranks on rank 0; None elsewhere."""

    def rows(*columns: Tensor) -> tuple[Tensor, ...] | None:
        return gather_rows(*(column[mask].to(device) for column in columns))

    reach = {layer: rows(each.distance, each.entropy, each.on_patches) for layer, each in local.reach.items()}
    norms = {layer: rows(each) for layer, each in local.norms.items()}
    first_norms = {layer: rows(each) for layer, each in local.first_norms.items()}
    (images,) = rows(torch.ones(len(mask), 1)) or (None,)
    if images is None:
        return None
    return replace(
        local,
        images=len(images),
        reach={layer: Reach(*columns) for layer, columns in reach.items() if columns is not None},
        norms={layer: columns[0] for layer, columns in norms.items() if columns is not None},
        first_norms={layer: columns[0] for layer, columns in first_norms.items() if columns is not None},
    )


def _drawn(findings: Findings) -> dict[str, np.ndarray]:
    from PIL import Image

    pictures = {}
    for figure in inspection_figures({"": findings}):
        png = standalone(figure.put, "png", width=figure.width, height=figure.height)
        pictures[f"inspect/{figure.key}"] = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    return pictures
