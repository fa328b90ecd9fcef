"""The program of every rank of a proof: the recipe's own learner, ten updates, each compared on rank 0.

    python -m vitscale.about.checks.rank FOLDER

FOLDER holds `recipe.yaml`, the small form, and its data; rank 0 leaves `proof.json` there.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from vitscale.about.checks.comparison import Comparison, State
from vitscale.about.checks.oracle import Oracle
from vitscale.about.checks.proving import PROOF_FILE, STEPS, make_batch, part_of, small_form
from vitscale.ground.errors import PeerLostError, VitscaleError
from vitscale.ground.ranks import gather, gather_rows
from vitscale.ground.safe_text import protect_output
from vitscale.launch import read_environment
from vitscale.models import initial_value, weight_dtype
from vitscale.recipe import Recipe, load_recipe
from vitscale.runs.checkpoint import weight_kinds
from vitscale.runs.names import RECIPE_FILE
from vitscale.training.beginning.automatic import settle
from vitscale.training.beginning.initial_weights import load_teacher
from vitscale.training.beginning.run_plan import plan_run
from vitscale.training.deepspeed import distributed
from vitscale.training.deepspeed.attention import Attention
from vitscale.training.deepspeed.fragments import AppliedGradients, GradientPiece, in_pieces
from vitscale.training.loop.learner import Learner
from vitscale.training.watching.preflight import preflight
from vitscale.training.watching.replicas import checksum

_SPREAD = 0.02  # added to initial values: where output layers are zero, most gradients are too
_TIMEOUT_S = 120.0
_GRADIENT = "gradient"  # among the kinds of what ranks hold


class Prover:
    """A recipe's learner and, on rank 0, its oracle. All ranks make one and call its methods together."""

    def __init__(self, recipe: Recipe, world: distributed.World, folder: Path) -> None:
        self._recipe, self._world = recipe, world
        self._plan = plan = plan_run(recipe, world.rank, world.size)
        preflight(plan, folder, world)
        self.learner = Learner(plan, world, lambda line: None)
        self.learner.load(None)
        self.learner.engine.load(in_pieces(self._start), optimizer_steps=0)
        self._applied = AppliedGradients(self.learner.engine.pieces, self.learner.engine.optimizer)
        distributed.set_timeout_everywhere(_TIMEOUT_S)
        self._comparison = self._make_comparison() if world.is_main else None

    def _make_comparison(self) -> Comparison:
        recipe, world, dtype = self._recipe, self._world, weight_dtype(self._recipe)
        oracle = Oracle(recipe, self._plan.num_classes, dtype, world.device)
        # A small form's teacher has initial weights, so that making one takes no other rank.
        teacher, _ = load_teacher(recipe, list(self._plan.manifest.class_names), world, lambda line: None)
        if teacher is not None:  # of the same weights as the learner's, in the engine's number format
            teacher.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(dtype),))
            oracle.module.learn_from(teacher)
        roundings = 2 + (world.size if recipe.parallelism.reduce_dtype == "bf16" else 0)
        return Comparison(oracle, self.learner.engine.shapes, dtype, roundings)

    def _start(self, name: str) -> torch.Tensor:
        """The initial value with noise added, so that no part of it is zero."""
        shape = torch.Size(self.learner.engine.shapes[name])
        value = initial_value(self.learner.objective, name, shape, self._recipe.seed)
        return value + _SPREAD * torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))

    def run(self, steps: int = STEPS) -> dict[str, Any] | None:
        """Make `steps` updates. Returns what was found on rank 0, and None on the others."""
        with Attention(self._world.device, self._recipe).preferred():
            before = self._gather(0, [])[0]
            for step in range(steps):
                before = self._take_step(step, before)
        return None if self._comparison is None else self._result(steps, self._comparison)

    def _take_step(self, step: int, before: State | None) -> State | None:
        """Take a step and compare it with what must follow from the earlier state. Returns the state after it."""
        batch = make_batch(self._recipe, self._plan.num_classes, step)
        update = self.learner.update(part_of(batch, self._world.rank, self._world.size), step)
        after, gradients = self._gather(step + 1, self._applied.take())
        if self._comparison is not None and before is not None and after is not None:
            rates = self._plan.rates(step)
            expected, norm = self._comparison.oracle.gradients(before.values, batch, self._plan.micro_batch, rates)
            applied = self._comparison.gradients(step + 1, expected, (norm, update.gradient_norm), gradients)
            self._comparison.updates(step + 1, before, after, applied, rates)
        # As evaluations do between two steps: weights and average change places and back.
        with self.learner.evaluating():
            self.learner.predict(batch.images[: self._plan.micro_batch])
        return after

    def _gather(self, step: int, gradients: list[GradientPiece]) -> tuple[State | None, list[list[GradientPiece]]]:
        """On rank 0, what all ranks hold, and their pieces of the gradients; compares the weights of every rank."""
        learner, recipe = self.learner, self._recipe
        pieces = [
            (kind, each.name, each.start, value.float().cpu())
            for each in learner.fragments()
            for kind, value in each.tensors.items()
        ]
        pieces += [(_GRADIENT, *piece) for piece in gradients]
        with learner.reading([learner.objective]):
            sums = {name: checksum(weight) for name, weight in learner.objective.named_weights()}
        by_rank = gather([[(kind, name, start, len(value)) for kind, name, start, value in pieces], sums])
        rows = gather_rows(torch.cat([torch.empty(0), *(each[-1] for each in pieces)]).to(self._world.device))
        if rows is None or self._comparison is None:
            return None, []
        shapes = {name: tuple(shape) for name, shape in learner.engine.shapes.items()}
        of_kind = dict.fromkeys(weight_kinds(recipe), shapes)
        for kind in learner.engine.moment_kinds():
            of_kind[kind] = {name: recipe.kept(name, shape).get(kind, ()) for name, shape in shapes.items()}
        values = {kind: {name: torch.full(of_kind[kind][name], torch.nan) for name in shapes} for kind in of_kind}
        applied: list[list[GradientPiece]] = [[] for _ in by_rank]
        left = rows[0]
        for rank, (where, _) in enumerate(by_rank):
            for kind, name, start, length in where:
                value, left = left[:length], left[length:]
                if kind == _GRADIENT:
                    applied[rank].append(GradientPiece(name, start, value))
                else:
                    values[kind][name].view(-1)[start : start + length] = value
        state = State(values, [sums for _, sums in by_rank])
        self._comparison.weights(step, state)
        return state, applied

    def _result(self, steps: int, comparison: Comparison) -> dict[str, Any]:
        return {
            "is_proven": not comparison.findings,
            "ranks": self._world.size,
            "steps": steps,
            "device": self._world.device.type,
            "precision": self._recipe.precision,
            "zero_stage": self._recipe.parallelism.zero_stage,
            "micro_batch": self._plan.micro_batch,
            "accumulation": self._plan.accumulation,
            "optimizer": self._recipe.optimizer.name,
            "objective": self._recipe.objective.kind,
            "clipped_steps": comparison.clipped,
            "norm": comparison.norm.plain(),
            "groups": comparison.groups(),
            "findings": comparison.findings,
            "deepspeed": self._plan.config,
        }


def main() -> None:
    """Entry point of a rank."""
    os.dup2(2, 1)  # the proof's own output is the parent's
    protect_output()
    folder, code = Path(sys.argv[1]), 0
    rank, size, local_rank, _ = read_environment()
    try:
        recipe, _ = settle(load_recipe(str(folder / RECIPE_FILE)), folder / "run", local_rank, size)
        result = Prover(small_form(recipe, folder, size), distributed.start(rank, size, local_rank), folder).run()
        if result is not None:
            (folder / PROOF_FILE).write_text(json.dumps(result))
    except VitscaleError as error:
        code = error.exit_code
        if rank == 0 or not error.is_on_all_ranks:
            sys.stderr.write(f"error: {error}\n")
    except RuntimeError as error:
        if not distributed.is_lost_peer(error):
            raise
        code = PeerLostError.exit_code  # the rank that has failed says why
    distributed.finish(code)


if __name__ == "__main__":
    main()
