"""Puts a finished model on this process's device, or spreads it over several devices, host memory and disk."""

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from accelerate import Accelerator, dispatch_model, infer_auto_device_map
from accelerate.utils import get_max_memory, offload_weight, save_offload_index
from torch import Tensor, nn

from vitscale.ground.errors import RecipeError, turned
from vitscale.ground.safe_text import shown

_ROOM = 0.8  # the share of a device's free memory that weights may take; the rest is for activations


def join(on_cpu: bool = False) -> Accelerator:
    """Accelerate's view of this process, alone or among those that `torchrun` started.

    On a machine without an accelerator, Accelerate must be told to use the CPU: otherwise its processes would not find
    each other, and each would evaluate everything. `on_cpu` uses the CPU even if there is an accelerator.
    """
    return Accelerator(cpu=on_cpu or not torch.accelerator.is_available())


def is_main() -> bool:
    """Whether this process is the one that writes and prints for all."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def tell(message: str) -> None:
    """Print a note, once for all processes, to standard error, as standard output is for results."""
    if is_main():
        print(shown(message), file=sys.stderr)


Module = TypeVar("Module", bound=nn.Module)
ReadTensor = Callable[[], Tensor]  # reads a whole parameter into host memory


def fill(model: Module, values: Mapping[str, ReadTensor], device: torch.device) -> Module:
    """Move a model from the meta device to one device, reading its values one parameter at a time."""
    for name, parameter in [*model.named_parameters()]:  # not by `to_empty`, which imports sympy for half a second
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).copy_(values[name]())
        _put(model, name, value, parameter.requires_grad)
    return model


def place(
    model: nn.Module,
    values: Mapping[str, ReadTensor],
    dtype: torch.dtype,
    accelerator: Accelerator,
    max_memory_gb: float | None = None,
) -> nn.Module:
    """Move a model from the meta device to where it computes, reading its values one parameter at a time.

    A model that does not fit on the device is spread by Accelerate over all devices of this process, then host memory,
    then files that vanish with the process.

    Args:
        values: how to read each parameter, by name.
        dtype: of the weights.
        max_memory_gb: the memory (10**9 bytes) that weights may take on each device; by default 80 % of what is free.

    Raises `RecipeError` if no part of the model fits on the device.
    """
    model = model.to(dtype).eval()
    size = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    limits = _limits(accelerator, max_memory_gb)
    if size <= next(iter(limits.values())):
        return fill(model, values, accelerator.device)
    return _spread(model, values, dtype, limits)


def _limits(accelerator: Accelerator, max_memory_gb: float | None) -> dict[int | str, int]:
    """Bytes that weights may take on each device of this process, its own one first, and in host memory."""
    limit = None if max_memory_gb is None else int(max_memory_gb * 1e9)
    found: dict[int | str, int] = {name: int(free * _ROOM) for name, free in get_max_memory().items()}
    own = accelerator.device.index or 0
    if accelerator.device.type == "cpu" or own not in found:
        return {"cpu": found["cpu"] if limit is None else limit}
    others = [] if accelerator.num_processes > 1 else [name for name in found if name not in (own, "cpu")]
    return {name: found[name] if limit is None else limit for name in (own, *others)} | {"cpu": found["cpu"]}


def _spread(
    model: nn.Module, values: Mapping[str, ReadTensor], dtype: torch.dtype, limits: dict[int | str, int]
) -> nn.Module:
    first = next(iter(limits))
    # Modules with both parameters of their own and submodules must not be split.
    whole = {
        type(module).__name__
        for module in model.modules()
        if any(True for _ in module.parameters(recurse=False)) and any(True for _ in module.children())
    }
    with turned(f"the model cannot be spread over {_listed(limits)}", RecipeError, ValueError, RuntimeError):
        places = infer_auto_device_map(model, {**limits}, no_split_module_classes=sorted(whole), dtype=dtype)
    if first not in places.values():
        raise RecipeError(f"no part of the model fits into {limits[first] / 1e9:.2f} GB of {first}")
    modules = {name for name, _ in model.named_modules()}
    # The model's own tensors are used by its own forward pass, before which no hook could fetch them.
    places = {name: place if name in modules else first for name, place in places.items()}
    folder = tempfile.TemporaryDirectory(prefix="vitscale-offload-")
    offloaded: dict[str, dict] = {}
    for name in dict(model.named_parameters()):
        covering = name
        while covering not in places:
            covering = covering.rpartition(".")[0]
        place, value = places[covering], values[name]().to(dtype)
        if place == "disk":
            offload_weight(value, name, folder.name, offloaded)
        else:
            _put(model, name, value.to(place), requires_grad=False)
    if offloaded:
        save_offload_index(offloaded, folder.name)
    order = ", ".join(str(place) for place in dict.fromkeys(places.values()))
    tell(f"the model takes more than {_listed(limits)}: it is spread over {order}")
    log = logging.getLogger("accelerate.big_modeling")
    level = log.level
    with warnings.catch_warnings():  # of tensors that are not in modules and weights on the disk: both are intended
        log.setLevel(logging.ERROR)
        warnings.simplefilter("ignore", UserWarning)
        model = dispatch_model(model, places, main_device=first, offload_dir=folder.name)
    log.setLevel(level)
    object.__setattr__(model, "offload_folder", folder)  # so that the folder lives as long as the model
    return model


def _put(model: nn.Module, name: str, value: Tensor, requires_grad: bool) -> None:
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, nn.Parameter(value, requires_grad))


def _listed(limits: Mapping[int | str, int]) -> str:
    return ", ".join(f"{size / 1e9:.2f} GB of {name}" for name, size in limits.items())
