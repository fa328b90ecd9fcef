"""Self-distillation: DINO (Caron et al., 2021), with iBOT's masked patches, KoLeo and Gram anchoring DINOv2 and DINOv3.

The teacher is the average of the weights, put in their place for a pass over the whole global batch. What is kept of
this pass are the rows that the heads' last layers compare with prototypes, a few hundred numbers each, and not the
logits. From the rows follow targets that use all prototypes equally; the passes that learn compute the logits anew.

Shape legend: B batch, V views of an image, G global ones, N patches, D width, E width of what is compared, K
prototypes, Q groups, R rows and C masked patches of a group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale import recipe as recipes
from vitscale.ground.ranks import Sums
from vitscale.ground.weight_formats import Format
from vitscale.models import Initialiser, Model, build_model, constant, normal
from vitscale.models.layers import Linear
from vitscale.models.vit import ViT
from vitscale.models.vit.dino import DINOV2, mask_rule, model_type
from vitscale.models.weights.rules import Rule, same
from vitscale.models.weights.source import MASK
from vitscale.objectives.block_masks import block_masks
from vitscale.objectives.dino_losses import class_losses, gram_losses, koleo, patch_losses, potentials, targets
from vitscale.objectives.objective import Agreed, Losses, Objective, Plan, Rows
from vitscale.recipe import Recipe


class Head(nn.Module):
    """A perceptron, whose outputs of length 1 are compared with prototypes by a last layer without bias.

    The last layer has no weight norm, as in DINOv3.
    """

    def __init__(self, width: int, settings: recipes.Dino, prototypes: int) -> None:
        super().__init__()
        hidden, compared = settings.hidden, settings.bottleneck
        first, second = Linear(width, hidden), Linear(hidden, hidden)
        self.layers = nn.Sequential(first, nn.GELU(), second, nn.GELU(), Linear(hidden, compared))
        self.last = Linear(compared, prototypes, bias=False)

    def compared(self, rows: Tensor) -> Tensor:
        """(..., D) -> fp32 (..., E)."""
        found: Tensor = F.normalize(self.layers(rows).float(), dim=-1)
        return found


class Dino(Objective):
    """Assigns all views of an image to the prototypes that an average of the model assigns its global views to.

    Args:
        backbone: a model without a head.
        settings: the recipe's block.
        width: D.
        are_global: by kind of views, whether the teacher sees them.
        masked: of a group's global views, how many patches of each are masked, and 0 for those without any; empty
            without iBOT.
    """

    def __init__(
        self, backbone: Model, settings: recipes.Dino, width: int, are_global: Sequence[bool], masked: Sequence[int]
    ) -> None:
        super().__init__(backbone)
        self.settings, self.are_global, self.masked = settings, are_global, masked
        self.dino = Head(width, settings, settings.prototypes)
        own = settings.ibot.prototypes if settings.ibot is not None else None
        self.ibot = Head(width, settings, own) if own is not None else None
        self.mask = nn.Parameter(torch.empty(1, 1, width)) if masked else None

    @classmethod
    def of(cls, recipe: Recipe, num_classes: int) -> Self:
        """As `Objective.of`; the classes play no part."""
        settings, context = recipe.objective, recipe.context
        assert isinstance(settings, recipes.Dino)
        masked = settings.masked(context) if settings.ibot is not None else []
        width = recipe.model.representation_width
        return cls(build_model(recipe, None), settings, width, settings.are_global(context), masked)

    def plan(self, keys: np.ndarray, step: int) -> Plan:
        """As `Objective.plan`: masks (B, G, N), and the places of masked patches among all of a group, int64 (Q, C)."""
        if not self.masked:
            return ()
        group, grid = self.settings.group, self.backbone.shape.grid(self.backbone.image_size)
        masks = block_masks(keys, grid, len(self.masked) // group, self.masked)
        places = np.flatnonzero(masks).reshape(len(keys) // group, -1) % (group * masks[0].size)
        return torch.from_numpy(masks), torch.from_numpy(places)

    # ---- The teacher -------------------------------------------------------------------------------------------------

    def prepared_kinds(self, kinds: int) -> Sequence[int]:
        """As `Objective.prepared_kinds`: the global ones."""
        return [kind for kind, is_global in enumerate(self.are_global) if is_global]

    def prepare(self, views: Sequence[Tensor], plan: Plan) -> Rows:
        """As `Objective.prepare`: what is compared, by group: of whole views (Q, R, E), of masked patches (Q, C, E)."""
        seen = self._seen(views, teacher=True)
        of_groups = len(seen.pooled) // self.settings.group
        return tuple(
            each.reshape(of_groups, -1, each.shape[-1]) for each in self._compared(seen, plan) if each is not None
        )

    def prepare_besides(self, views: Sequence[Tensor], plan: Plan, average: str) -> Rows:
        """As `Objective.prepare_besides`: the patches of global views, (B, G, N, D)."""
        return self._patches(self._seen(views, teacher=True))

    @torch.no_grad()
    def agree(self, rows: Rows, labels: Tensor, sums: Sums, weights: Mapping[str, Tensor]) -> Agreed:
        """As `Objective.agree`: the rows; shared, for whole views and for patches, potentials and prototypes."""
        shared: list[Tensor] = []
        names = ("dino", "dino" if self.ibot is None else "ibot")[: 1 + bool(self.masked)]
        for rows_QRE, name in zip(rows, names, strict=False):
            prototypes_KE = weights[f"{name}.last.weight"]
            shared += [potentials(partial(self._logits, rows_QRE, prototypes_KE), sums), prototypes_KE]
        return Agreed(tuple(rows), tuple(shared))

    def _logits(self, rows_QRE: Tensor, prototypes_KE: Tensor) -> Iterator[Tensor]:
        """The teacher's logits, divided by its temperature, of one group (R, K) after another: products of matrices of
        the same size have the same bits on every world.
        """
        prototypes_EK = prototypes_KE.float().T
        for rows_RE in rows_QRE:
            yield rows_RE @ prototypes_EK / self.scalars["teacher_temperature"]

    def _targets(self, rows_QRE: Tensor, potentials_K: Tensor, prototypes_KE: Tensor) -> Tensor:
        """(Q R, K)."""
        return torch.cat([targets(each, potentials_K) for each in self._logits(rows_QRE, prototypes_KE)])

    # ---- The student -------------------------------------------------------------------------------------------------

    def losses(self, views: Sequence[Tensor], labels: Tensor, plan: Plan) -> Losses:
        """As `Objective.losses`; also its parts, and the entropy of the targets of whole views, in nats."""
        settings, heads, agreed = self.settings, 1 + bool(self.masked), plan[2:] if self.masked else plan
        rows, anchors, shared = agreed[:heads], agreed[heads : -2 * heads], agreed[-2 * heads :]
        seen = self._seen(views, teacher=False, masks_BGN=plan[0] if self.masked else None)
        whole_BVK, patches_CK = self._student_logits(*self._compared(seen, plan))
        with torch.no_grad():
            targets_BGK = self._targets(rows[0], *shared[:2]).view(len(whole_BVK), -1, whole_BVK.shape[2])
            shown = {"target_entropy": torch.special.entr(targets_BGK).sum(dim=2).mean(dim=1)}
        shown["dino"] = total = class_losses(whole_BVK, targets_BGK)
        if settings.ibot is not None:
            with torch.no_grad():
                targets_CK = self._targets(rows[1], *shared[2:])
            assert patches_CK is not None
            shown["ibot"] = patch_losses(patches_CK, targets_CK, *plan[:2])
            total = total + settings.ibot.weight * shown["ibot"]
        if settings.koleo:
            shown["koleo"] = koleo(seen.pooled[:, : targets_BGK.shape[1]], settings.group)
            total = total + settings.koleo * shown["koleo"]
        if anchors:
            shown["gram"] = gram_losses(self._patches(seen), *anchors)
            total = total + self.scalars["gram.weight"] * shown["gram"]
        return Losses(total, {name: each.detach() for name, each in shown.items()})

    def _student_logits(self, whole_BVE: Tensor, patches_CE: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(B, V, K) and (Q C, K), divided by the student's temperature, fp32."""
        shape, whole, patches = whole_BVE.shape[:2], whole_BVE.flatten(0, 1), patches_CE
        dtype, temperature = self.dino.last.weight.dtype, self.settings.temperature
        if patches is None:
            return self.dino.last(whole.to(dtype)).float().div(temperature).unflatten(0, shape), None
        if self.ibot is None:  # a module is called once: see `objective`
            both = self.dino.last(torch.cat([whole, patches]).to(dtype)).float().div(temperature)
            return both[: len(whole)].unflatten(0, shape), both[len(whole) :]
        of_whole, of_patches = self.dino.last(whole.to(dtype)), self.ibot.last(patches.to(dtype))
        return of_whole.float().div(temperature).unflatten(0, shape), of_patches.float().div(temperature)

    # ---- Both --------------------------------------------------------------------------------------------------------

    def _seen(self, views: Sequence[Tensor], *, teacher: bool, masks_BGN: Tensor | None = None) -> "_Seen":
        """What the backbone makes of views in one call: first of the global ones, which are all that a teacher sees."""
        of_kinds = [(each, True) for each in views] if teacher else list(zip(views, self.are_global, strict=True))
        batches = [torch.cat([each for each, is_global in of_kinds if is_global], dim=1)]
        if not teacher:
            batches += [each for each, is_global in of_kinds if not is_global]
        edits: list[Callable[[Tensor], Tensor] | None] = [None] * len(batches)
        if masks_BGN is not None and self.mask is not None:
            is_masked, embedding = masks_BGN.flatten(0, 1)[..., None], self.mask
            edits[0] = lambda patches: torch.where(is_masked, embedding, patches)
        outputs = self.backbone([each.flatten(0, 1) for each in batches], edit=edits)
        pooled = [out.pooled.unflatten(0, each.shape[:2]) for out, each in zip(outputs, batches, strict=True)]
        return _Seen(torch.cat(pooled, dim=1), outputs[0].tokens)

    def _patches(self, seen: "_Seen") -> Tensor:
        """Those of global views, (B, G, N, D)."""
        return self.backbone.patch_tokens(seen.tokens).unflatten(0, (len(seen.pooled), -1))

    def _compared(self, seen: "_Seen", plan: Plan) -> tuple[Tensor, Tensor | None]:
        """What is compared with prototypes: of whole views (B, V, E), and of masked patches (Q C, E)."""
        if not self.masked:
            return self.dino.compared(seen.pooled), None
        places_QC, tokens = plan[1], self.backbone.patch_tokens(seen.tokens).flatten(0, 1)
        first = torch.arange(len(places_QC), device=places_QC.device) * (len(tokens) // len(places_QC))
        patches = tokens[(places_QC + first[:, None]).flatten()]
        if self.ibot is not None:
            return self.dino.compared(seen.pooled), self.ibot.compared(patches)
        whole = seen.pooled.flatten(0, 1)
        both = self.dino.compared(torch.cat([whole, patches]))
        return both[: len(whole)].unflatten(0, seen.pooled.shape[:2]), both[len(whole) :]

    # ---- Parameters --------------------------------------------------------------------------------------------------

    def rules(self, form: Format) -> Sequence[Rule]:
        """As `Objective.rules`: ours, with which a run continues another one's heads; of others', the mask."""
        model = self.backbone
        if form == "timm" and self.mask is not None:  # in files of DINOv2's authors
            return [mask_rule("mask", DINOV2[0], MASK)]
        if form == "hf" and self.mask is not None and isinstance(model, ViT) and (kind := model_type(model)):
            return [mask_rule("mask", kind)]
        own = [name for name, _ in self.named_parameters() if not name.startswith("backbone.")]
        return [same(name, name) for name in own] if form == "safetensors" else []

    def initialiser(self, name: str) -> Initialiser:
        """As `Objective.initialiser`: as in DINOv2, the mask embedding 0, and dense layers a normal distribution."""
        if name == "mask" or name.startswith(("dino.", "ibot.")):
            return normal(0.02) if name.endswith("weight") else constant(0.0)
        return super().initialiser(name)


class _Seen(NamedTuple):
    """What a backbone makes of views: representations (B, V, D), and the tokens of global views (B G, T, D)."""

    pooled: Tensor
    tokens: Tensor
