"""Checks on occasional steps that the update DeepSpeed made is the one that the batch calls for.

Such a step is watched from outside DeepSpeed, and nothing about it is changed:

- **Gradients.** A hook on each parameter sees what autograd computes there, before anything else does. Random
  projections of it (projections.py), summed over micro-batches and ranks, are compared with those of the gradient that
  the optimizer is given, fragment by fragment. What must agree is the gradient of the global batch's mean loss; a hook
  on the losses finds the factor that DeepSpeed has multiplied the loss by.
- **Norm and clipping.** The norm that DeepSpeed reports is that of the gradient that it applies.
- **Updates.** Some elements of every fragment are recomputed from their earlier state by the optimizer's formula
  (`Rule.of_elements`). The state afterwards is taken from what a checkpoint would hold.
- **Weights.** The weights that each rank computes with are, bit by bit, their owner's fp32 weights rounded: before and
  after the step, and under ZeRO 3 also as gathered in the forward and backward passes.

How far two numbers may differ follows from their formats. With random signs an error e of a vector becomes one of about
|e|, and larger than 8 |e| with a probability of less than 3e-14 (Hoeffding), so |e| has only to be bounded.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitscale.ground.errors import AuditError
from vitscale.ground.ranks import gather, reduce_sum
from vitscale.recipe import Recipe
from vitscale.runs.checkpoint import MASTER, Fragment
from vitscale.training.deepspeed import fragments
from vitscale.training.deepspeed.distributed import World
from vitscale.training.deepspeed.engine import Engine
from vitscale.training.optimizers.parameter_groups import INDEX, LR_FACTOR, parameter_groups
from vitscale.training.optimizers.projections import key_of, project, sample
from vitscale.training.optimizers.rule import State, Update, rule_of
from vitscale.training.optimizers.schedule import Rates
from vitscale.training.optimizers.whole_tensors import Piece
from vitscale.training.watching.replicas import checksum

_SAMPLED = 64  # elements checked in each fragment
_DEVIATIONS = 8.0
_BF16, _FP32 = 2.0**-9, 2.0**-24  # half a unit in the last place
_NORM = 2.0**-6  # relative error of a norm that is computed in bf16
_SHOWN = 2  # findings shown of each check
_ORDER = ("weights", "gradient", "update", "checkpoint", "norm")  # causes before what may follow from them


@dataclass(frozen=True)
class Discrepancy:
    """One thing that an audit found wrong."""

    check: str  # gradient, norm, update, checkpoint or weights
    rank: int  # that found it
    what: str  # in words
    name: str = ""  # the parameter's; empty if the finding is about no single one
    start: int = 0  # the fragment's first element
    length: int = 0  # its number of elements
    missing: tuple[float, ...] | None = None  # projection of what is missing from a gradient, and its tolerance

    def __str__(self) -> str:
        where = f" {self.name} [{self.start:,}:{self.start + self.length:,}]" if self.name else ""
        return f"{self.check} of rank {self.rank}{where}: {self.what}"


class _Fragment(NamedTuple):
    name: str
    start: int
    length: int
    rank: int


class _Sampled(NamedTuple):
    places: Tensor
    state: State
    gradient: Tensor


class Audit:
    """One audited step: construct it before the first micro-batch on every rank, and `end` it after the update.

    Args:
        rates: the rates that the optimizer should be given.
        to_save: returns what this rank would save now.
    """

    def __init__(
        self, engine: Engine, recipe: Recipe, world: World, rates: Rates, to_save: Callable[[], list[Fragment]]
    ) -> None:
        self._engine, self._recipe, self._world, self._rates, self._to_save = engine, recipe, world, rates, to_save
        self._counts = not engine.is_replicated or world.is_main  # in sums over ranks, what is on all of them once
        self._findings: list[Discrepancy] = []
        self._trained = {name: each for name, each in engine.module.named_weights() if each.requires_grad}
        self._rule, self._updates = rule_of(recipe.optimizer), _updates(recipe, engine, rates)
        self._lay_out()
        self._local = torch.zeros(len(self._places), 2, dtype=torch.float64, device=world.device)
        self._applied: dict[Piece, tuple[float, float]] = {}
        self._sampled: dict[Piece, _Sampled] = {}
        self._seed = 0.0
        self._seen: set[tuple[str, str]] = set()
        self._names: dict[nn.Parameter, str] = {}  # under ZeRO 3, if weights are gathered unquantised
        is_quantised = recipe.deepspeed.get("zero_optimization", {}).get("zero_quantized_weights")
        if recipe.parallelism.zero_stage == 3 and not is_quantised:
            self._names = {parameter: name for name, parameter in self._trained.items()}
        self._owners_checksums = self._compare_weights("before the step")
        self._hooks: list[Any] = [engine.optimizer.register_step_pre_hook(self._before_update)]
        for name, parameter in self._trained.items():
            self._hooks.append(parameter.register_hook(partial(self._take_gradient, name, parameter)))
        if self._names:
            for module in engine.module.modules():  # runs after DeepSpeed's own hook, which gathers
                self._hooks.append(module.register_forward_pre_hook(self._look_at_gathered))

    def _lay_out(self) -> None:
        """Work out which rank has which part of each parameter."""
        mine = [(piece.name, piece.start, piece.length) for piece in self._engine.pieces]
        by_rank = [mine] if self._engine.is_replicated else gather(mine)
        order = {name: index for index, name in enumerate(self._trained)}
        places = [
            _Fragment(name, start, length, rank)
            for rank, pieces in enumerate(by_rank)
            for name, start, length in pieces
        ]
        self._places = sorted(places, key=lambda place: (order[place.name], place.start))
        self._index = {(place.name, place.start): index for index, place in enumerate(self._places)}
        by_name = groupby(range(len(self._places)), key=lambda row: self._places[row].name)
        rows_of = {name: list(rows) for name, rows in by_name}
        self._rows: dict[str, tuple[int, Tensor]] = {}
        for name in self._trained:
            rows = rows_of.get(name, [])
            lengths = [self._places[row].length for row in rows]
            if sum(lengths) != math.prod(self._engine.shapes[name]):
                self._find("update", f"the ranks update {sum(lengths):,} of its elements", _Fragment(name, 0, 0, 0))
            self._rows[name] = rows[0] if rows else 0, torch.tensor(lengths, dtype=torch.int64)

    def _find(self, check: str, what: str, where: Piece | _Fragment | None, *missing: float) -> None:
        name, start, length = ("", 0, 0) if where is None else (where.name, where.start, where.length)
        self._findings.append(Discrepancy(check, self._world.rank, what, name, start, length, missing or None))

    def watch(self, losses: Tensor) -> None:
        """Watch a micro-batch's losses (b,); called before its backward pass."""

        def note_seed(gradient: Tensor) -> None:
            # The losses' factor in the backward pass; 0 if a sample does not count.
            self._seed = float(gradient.detach().float().max())

        losses.register_hook(note_seed)

    def _take_gradient(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Called by autograd with a part of this rank's gradient, usually that of a whole micro-batch."""
        first, lengths = self._rows[name]
        if self._seed > 0 and int(lengths.sum()) == gradient.numel():
            projected = project(gradient.detach().reshape(-1), 0, self._key(name), lengths)
            self._local[first : first + len(lengths)] += projected / projected.new_tensor([self._seed, self._seed**2])
        if self._names:
            self._compare_gathered(name, parameter, "backward")

    def _look_at_gathered(self, module: nn.Module, _inputs: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in self._names:
                self._compare_gathered(self._names[parameter], parameter, "forward")

    def _compare_gathered(self, name: str, parameter: Any, way: str) -> None:
        """Under ZeRO 3, compare a parameter gathered now with its owners' parts, once forward and once backward."""
        if (name, way) in self._seen or parameter.numel() != parameter.ds_numel:
            return
        self._seen.add((name, way))
        first, lengths = self._rows[name]
        if checksum(parameter) != sum(self._owners_checksums[first : first + len(lengths)]) % 2**64:
            what = f"it is gathered with other values than its owners have, on the way {way}"
            self._find("weights", what, _Fragment(name, 0, parameter.numel(), 0))

    def _key(self, name: str) -> int:
        return key_of(self._recipe.seed, self._rates.updates, name)

    @torch.no_grad()
    def _before_update(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        """Called by torch before an optimizer's step, which may be for only some of its tensors."""
        for piece in fragments.stepped(self._engine.pieces, optimizer):
            if piece in self._applied:
                continue
            key, gradient = self._key(piece.name), fragments.given_gradient(piece, optimizer)
            dot, square = project(gradient, piece.start, key, torch.tensor([piece.length]))[0].tolist()
            self._applied[piece] = dot, math.sqrt(square)
            places = sample(piece.length, _SAMPLED, key).to(piece.flat.device)
            state = {kind: values[places].double().cpu() for kind, values in self._state(piece).items()}
            self._sampled[piece] = _Sampled(places, state, gradient[places].double().cpu())

    def _state(self, piece: Piece) -> dict[str, Tensor]:
        state, kinds = self._engine.optimizer.state[piece.flat], self._engine.kinds_as_parameter(piece.name)
        return {MASTER: piece.view(piece.flat)} | {kind: piece.view(state[kind]) for kind in kinds}

    @torch.no_grad()
    def end(self, *, samples: int, gradient_norm: float, was_made: bool) -> list[Discrepancy]:
        """Remove the hooks and return the findings of all ranks, the same list on every rank.

        Args:
            samples: the number of samples of the global batch that count.
            gradient_norm: the norm before clipping, as DeepSpeed reports it.
            was_made: whether there was an update at all.
        """
        for hook in self._hooks:
            hook.remove()
        if not was_made:
            return []
        totals = reduce_sum(self._local) / torch.tensor([samples, samples**2], device=self._local.device)
        squares = sum(norm**2 for _, norm in self._applied.values()) if self._counts else 0.0
        applied = math.sqrt(float(reduce_sum(self._local.new_tensor(squares))))
        clipping = 1.0
        if self._recipe.optimizer.clip_norm is not None:
            clipping = min(1.0, self._recipe.optimizer.clip_norm / (gradient_norm + 1e-6))
        if not math.isclose(gradient_norm * clipping, applied, rel_tol=_NORM, abs_tol=1e-30):
            clipped = "" if clipping == 1 else f", clipped to {gradient_norm * clipping:.6g},"
            what = f"DeepSpeed reports {gradient_norm:.6g}{clipped} and applies a gradient of norm {applied:.6g}"
            self._find("norm", what, None)
        self._check_gradients(totals.tolist(), clipping)
        self._check_updates(totals[:, 1].tolist())
        self._compare_weights("after the step")
        by_rank = gather([asdict(finding) for finding in self._findings])
        findings = [Discrepancy(**finding) for of_rank in by_rank for finding in of_rank]
        return self._explained(findings, samples) if findings else []

    def _check_gradients(self, totals: Sequence[Sequence[float]], clipping: float) -> None:
        once = _roundings(self._recipe, self._world.size)
        for piece, values in self._applied.items() if math.isfinite(once) else ():
            dot, norm = (value / clipping for value in values)
            expected, squares = totals[self._index[piece.name, piece.start]]
            off = _DEVIATIONS * once * (norm + math.sqrt(squares))
            if not abs(dot - expected) <= off:
                computed = f"the ranks computed {expected:.6g} ± {off:.2g} (in projection)"
                what = f"the optimizer is given {dot:.6g}, {computed}"
                self._find("gradient", what, piece, expected - dot, off)

    def _check_updates(self, squares: Sequence[float]) -> None:
        """Check that masters and moments follow from the earlier ones, and are what a checkpoint would hold.

        `squares` are sums of squares of the gradients that the ranks computed, by fragment.
        """
        saved: dict[tuple[str, int], dict[str, Tensor]] = {}
        for fragment in self._to_save():
            saved.setdefault((fragment.name, fragment.start), {}).update(fragment.tensors)
        shares = torch.zeros(len(self._places), dtype=torch.float64)
        for piece in self._engine.pieces:
            now = self._state(piece)
            to_save = saved.get((piece.name, piece.start), {})
            kinds = now.keys() & to_save.keys()
            shares[self._index[piece.name, piece.start]] = len(kinds) / len(now)
            now |= {kind: to_save[kind] for kind in kinds}
            if piece in self._sampled:
                self._check_rule(piece, self._sampled[piece], now)
            elif squares[self._index[piece.name, piece.start]]:  # torch's optimizers leave out what has no gradient
                self._find("update", "the optimizer was not asked to update it", piece)
        for place, share in zip(self._places, reduce_sum(shares.to(self._world.device)).tolist(), strict=True):
            if self._world.is_main and not math.isclose(share, 1):
                self._find("checkpoint", f"{share:.0%} of its state is among what the ranks would save", place)

    def _check_rule(self, piece: Piece, before: _Sampled, now: dict[str, Tensor]) -> None:
        after = {kind: values[before.places].double().cpu() for kind, values in now.items()}
        expected = self._rule.of_elements(self._updates[piece.name], before.state, before.gradient, after)
        for kind, (value, off) in expected.items():
            wrong = ~((after[kind] - value).abs() <= off)
            if wrong.any():
                at = int(wrong.nonzero()[0])
                was, is_now, wanted = (float(each[at]) for each in (before.state[kind], after[kind], value))
                where = f"{kind} at element {piece.start + int(before.places[at]):,}"
                more = f" ({int(wrong.sum())} of {len(wrong)} elements are wrong)"
                what = f"{where} changed from {was:.9g} to {is_now:.9g} instead of {wanted:.9g}{more}"
                self._find("update", what, piece)

    @torch.no_grad()
    def _compare_weights(self, when: str) -> list[int]:
        """Compare this rank's weights with the owners' masters, rounded. Returns the masters' checksums by fragment."""
        self._engine.settle_weights()
        sums = torch.zeros(len(self._places), dtype=torch.int64)
        for piece in self._engine.pieces if self._counts else []:
            total = checksum(piece.view(piece.flat).to(self._trained[piece.name].dtype), piece.start)
            sums[self._index[piece.name, piece.start]] = total - 2**64 if total >= 2**63 else total  # int64 is signed
        of_owners = [int(each) % 2**64 for each in reduce_sum(sums.to(self._world.device)).tolist()]
        for index, place in enumerate(self._places):
            weights = self._weights_at(place)
            if weights is not None and checksum(weights, place.start) != of_owners[index]:
                what = f"{when}, the weights used in computing are not rank {place.rank}'s masters, rounded"
                self._find("weights", what, place)
        return of_owners

    def _weights_at(self, place: _Fragment) -> Tensor | None:
        """A fragment of the weights that this rank computes with, 1-D; None under ZeRO 3 if another rank has it."""
        parameter: Any = self._trained[place.name]
        if not hasattr(parameter, "ds_tensor") or (self._names and parameter.numel() == parameter.ds_numel):
            whole: Tensor = parameter.detach().reshape(-1)
            return whole[place.start : place.start + place.length]
        if place.rank != self._world.rank:
            return None
        share: Tensor = parameter.ds_tensor.detach()[: place.length]
        return share

    def _explained(self, findings: list[Discrepancy], samples: int) -> list[Discrepancy]:
        """The findings, causes first, naming the rank whose part of the gradient was left out or counted twice."""
        local = gather((self._local[:, 0] / samples).tolist())
        wrong = [(one, one.missing) for one in findings if one.missing is not None]
        parts = [[of_rank[self._index[one.name, one.start]] for of_rank in local] for one, _ in wrong]
        cause = _cause([missing for _, missing in wrong], parts)
        why = "" if cause is None else f", as {cause}"
        findings = [one if one.missing is None else replace(one, what=f"{one.what}{why}") for one in findings]
        return sorted(findings, key=lambda one: _ORDER.index(one.check))


def _cause(missing: Sequence[tuple[float, ...]], parts: Sequence[Sequence[float]]) -> str | None:
    """Names the one rank whose part is missing or doubled in all wrong fragments; None if none or several explain them.

    Args:
        missing: for each fragment, the projection of what is missing, and how far that may be off.
        parts: for each fragment, the projection of what each rank has computed.
    """
    suspects = {"without the part of any rank": [sum(of_ranks) for of_ranks in parts]}
    for rank in range(len(parts[0]) if parts and len(parts[0]) > 1 else 0):
        suspects[f"without the part of rank {rank}"] = [of_ranks[rank] for of_ranks in parts]
        suspects[f"with twice the part of rank {rank}"] = [-of_ranks[rank] for of_ranks in parts]

    def fits(amounts: list[float]) -> bool:
        return all(abs(each - amount) <= off for (each, off), amount in zip(missing, amounts, strict=True))

    fitting = [words for words, amounts in suspects.items() if fits(amounts)]
    return fitting[0] if missing and len(fitting) == 1 else None


def _roundings(recipe: Recipe, ranks: int) -> float:
    """The relative error that a gradient may pick up after autograd; infinite if it is quantised."""
    if recipe.deepspeed.get("zero_optimization", {}).get("zero_quantized_gradients"):
        return math.inf
    is_added = not {"torch_autocast", "communication_data_type", "data_types"}.isdisjoint(recipe.deepspeed)
    sums = math.sqrt(ranks)  # independent roundings in a sum over ranks
    off = _FP32 * (8 + sums)
    if recipe.precision != "fp32" or is_added:
        off += _BF16 * (2 + (sums if recipe.parallelism.reduce_dtype == "bf16" or is_added else 0))
    return off


def _updates(recipe: Recipe, engine: Engine, rates: Rates) -> dict[str, Update]:
    """How each parameter must be updated, by the recipe and not by what DeepSpeed has in its groups."""
    names = {parameter: name for name, parameter in engine.module.named_weights()}
    optimizer, factor = recipe.optimizer, rates.weight_decay_factor
    momentum = optimizer.first_momentum if rates.momentum is None else rates.momentum
    return {
        names[parameter]: Update(
            shape=recipe.axes(names[parameter], tuple(engine.shapes[names[parameter]])),
            number=rates.updates + 1,
            rate=0.0 if group[INDEX] in rates.waiting else rates.learning_rate * group[LR_FACTOR],
            decay=group["weight_decay"] * (1.0 if factor is None else factor),
            momentum=momentum,
        )
        for group in parameter_groups(recipe, engine.module)
        for parameter in group["params"]
    }


def describe(findings: Sequence[Discrepancy], step: int) -> str:
    lines = []
    for check, group in groupby(findings, key=lambda finding: finding.check):
        of_check = list(map(str, group))
        lines += of_check[:_SHOWN]
        lines += [f"and {len(of_check) - _SHOWN:,} more of {check}"] if len(of_check) > _SHOWN else []
    return f"step {step:,}: the update is not that of the batch: {'; '.join(lines)}"


def error(findings: Sequence[Discrepancy], step: int) -> AuditError:
    return AuditError(
        f"{describe(findings, step)}. DeepSpeed or a device computes wrongly; repeat the command to continue from "
        "the last checkpoint. If it happens again, change parallelism, or set check.audit: warn to continue regardless"
    ).on_all_ranks()
