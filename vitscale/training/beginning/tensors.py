"""A model's parameters, and the tensors of one forward and backward pass, counted without computing them.

The model runs on fake tensors, which have shapes, dtypes and storages but no values. So every architecture is counted
as torch's autograd really saves it, including attention kernels, in less than a second whatever the model's size.

The kernels are the CPU's. Its attention saves queries, keys, values, the result and a logarithm for each query, as
CUDA's fused kernels do. By torch's source, not measured by us, CUDA differs in two ways: dropout keeps one byte per
element instead of its noise in the tensor's dtype, and is counted so; with relative positions the fused kernel saves
fewer tensors of B x A x T x T than the CPU's plain formula, so the count is too high.
"""

import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitscale.ground.ranks import Sums
from vitscale.models import weight_dtype
from vitscale.models.layers import CHANNELS
from vitscale.objectives import Objective, Plan, build_objective, build_teacher
from vitscale.objectives.objective import Rows, all_rows, dealt, joined
from vitscale.recipe import Recipe, is_frozen
from vitscale.recipe.masked_patches import MaskedPatches

DeviceType = Literal["cpu", "cuda"]

_IN_A_BLOCK = re.compile(r"^backbone\.blocks\.(\d+)\.")


class Layer(NamedTuple):
    """A module that has parameters of its own."""

    block: int | None  # the index of its encoder block; None outside the blocks
    sizes: tuple[int, ...]  # elements of each parameter
    trained: tuple[int, ...]  # elements of each parameter that is not frozen


@dataclass(frozen=True)
class Parameters:
    """All layers of a model, in the order of the forward pass."""

    layers: tuple[Layer, ...]
    kept: int  # elements of optimizer state, without the trained parameters' own values
    kept_bytes: int  # of that state, in the optimizer's dtypes; checkpoints store fp32
    of_teacher: int = 0  # parameters of a teacher, which every rank holds whole

    @cached_property
    def sizes(self) -> list[int]:
        """The number of elements of every parameter."""
        return [size for layer in self.layers for size in layer.sizes]

    @cached_property
    def trained(self) -> list[int]:
        """The number of elements of every parameter that is not frozen."""
        return [size for layer in self.layers for size in layer.trained]

    @cached_property
    def total(self) -> int:
        """The number of elements of all parameters together."""
        return sum(self.sizes)


def model_parameters(recipe: Recipe, num_classes: int) -> Parameters:
    """The parameters of a recipe's model."""
    with torch.device("meta"):
        objective, teacher = build_objective(recipe, num_classes), build_teacher(recipe, num_classes)
    trained = {p: name for name, p in objective.named_weights() if not is_frozen(recipe.optimizer, name)}
    state = [each for p, name in trained.items() for each in recipe.kept(name, tuple(p.shape)).items()]
    kept = sum(math.prod(shape) for _, shape in state)
    kept_bytes = sum(math.prod(shape) * (2 if kind in recipe.optimizer.kept_in_bf16 else 4) for kind, shape in state)
    layers = []
    for name, module in objective.named_modules():
        block = _IN_A_BLOCK.match(name)
        sizes = {p: p.numel() for p in module.parameters(recurse=False)}
        if sizes:
            of_trained = tuple(size for p, size in sizes.items() if p in trained)
            layers.append(Layer(int(block[1]) if block else None, tuple(sizes.values()), of_trained))
    of_teacher = 0 if teacher is None else sum(parameter.numel() for parameter in teacher.parameters())
    return Parameters(tuple(layers), kept, kept_bytes, of_teacher)


class StepTensors(NamedTuple):
    """The activation memory of one micro-batch, in bytes."""

    saved: int  # what the forward pass and the loss keep for the backward pass, without parameters
    transient: int  # what the passes hold beyond that at their peak, without parameters' gradients


class _AnyNumbers(nn.Module):
    """In place of a tokenizer, whose own tensors are not counted: its package and weights may not be here."""

    def __init__(self, num_patches: int) -> None:
        super().__init__()
        self.num_patches = num_patches

    def forward(self, images: Tensor) -> Tensor:
        return torch.zeros(len(images), self.num_patches, dtype=torch.int64, device=images.device)


def step_tensors(
    recipe: Recipe, num_classes: int, micro_batch: int, device: DeviceType = "cpu", ranks: int = 1
) -> StepTensors:
    """Count the tensors of a forward and backward pass over `micro_batch` images.

    `ranks` share what is kept of a first pass over the whole global batch.
    """
    dtype = weight_dtype(recipe)
    with FakeTensorMode():
        with _default_dtype(dtype):
            objective = build_objective(recipe, num_classes).train()
            if (teacher := build_teacher(recipe, num_classes)) is not None:
                objective.learn_from(teacher)
            elif isinstance(recipe.objective, MaskedPatches):
                objective.learn_from(_AnyNumbers(num_patches=len(objective.plan(np.arange(1), 0)[0][0])))
        parameters = list(objective.parameters())
        plan = objective.plan(np.arange(micro_batch), 0)
        if device == "cuda":
            _use_dropout_of_cuda(objective)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        labels = torch.zeros(micro_batch, dtype=torch.int64)
        with _LiveStorages(parameters) as live:
            views = [
                torch.empty(micro_batch, view.count, side, side, CHANNELS, dtype=dtype)
                for view, side in recipe.data.training_views()
            ]
            if recipe.objective.prepares is not None:
                first = [views[kind] for kind in objective.prepared_kinds(len(views))]
                with torch.no_grad():
                    passes = [objective(first, None, plan, name) for name in (None, *recipe.objective.besides)]
                prepared = all_rows(passes)
                plan = (*plan, *_agreed(recipe, objective, prepared, micro_batch, ranks))
                del passes, prepared
            with saved_storages(parameters) as saved:
                losses = objective(views, labels, plan)
                loss = losses.per_sample.sum()
            saved_bytes = sum(storage.nbytes() for storage in saved.values())
            saved.clear()
            del losses
            loss.backward()
    return StepTensors(saved_bytes, live.peak - saved_bytes)


class _AsIfMany(Sums):
    """Of ranks that are not there: shapes are all that is asked for."""

    def rows(self, values: Tensor) -> Tensor:
        return torch.cat([values] * self.ranks)

    def total(self, terms: Tensor | Iterable[Tensor]) -> Tensor:
        return Sums().total(terms)

    def greatest(self, values: Tensor) -> Tensor:
        return values


def _agreed(recipe: Recipe, objective: Objective, prepared: Rows, micro_batch: int, ranks: int) -> Plan:
    """What one of so many ranks derives from the global batch: a micro-batch's part, which keeps the whole alive."""
    parts = -(-recipe.batch.global_size // (ranks * micro_batch))
    rows, settings = joined([prepared] * parts), recipe.objective
    weights = {name: each.detach().clone() for name, each in objective.named_weights() if name in settings.reads}
    labels = torch.zeros(parts * micro_batch, dtype=torch.int64)
    agreed = objective.agree(rows, labels, _AsIfMany(ranks=ranks), weights)
    return (*dealt(agreed.rows, parts)[0], *agreed.shared)


@contextmanager
def saved_storages(parameters: list[nn.Parameter]) -> Iterator[dict[int, torch.UntypedStorage]]:
    """Collects the storages that autograd saves in this context, by identity, without those of parameters."""
    left_out = {_identity(parameter) for parameter in parameters}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _identity(tensor) not in left_out:
            saved[_identity(tensor)] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype: existing fake parameters cannot be converted, so they are created in their dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _use_dropout_of_cuda(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            module.forward = lambda x, rate=module.p: torch.native_dropout(x, rate, True)[0]  # type: ignore[method-assign,misc]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _LiveStorages(TorchDispatchMode):
    """Tracks the bytes of storages that operations create until they are freed; `peak` is the most at any one time."""

    def __init__(self, known: list[nn.Parameter]) -> None:
        super().__init__()
        self.peak = 0
        self._bytes = {_identity(tensor): 0 for tensor in known}
        self._live = 0

    def __torch_dispatch__(self, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _identity(tensor) not in self._bytes:
                storage = tensor.untyped_storage()
                self._bytes[storage._cdata] = storage.nbytes()
                self._live += storage.nbytes()
                self.peak = max(self.peak, self._live)
                weakref.finalize(storage, self._remove, storage._cdata)
        return result

    def _remove(self, identity: int) -> None:
        self._live -= self._bytes.pop(identity)
