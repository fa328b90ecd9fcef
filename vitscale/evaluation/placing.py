"""Where a finished model computes: this process's device, or several devices, host memory and disk together."""

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from accelerate import Accelerator, dispatch_model, infer_auto_device_map
from accelerate.utils import get_max_memory, offload_weight, save_offload_index
from torch import Tensor, nn

from vitscale.errors import RecipeError

_ROOM = 0.8
"""Part of a device's free memory that weights may take; the rest is for activations."""


def join(on_cpu: bool = False) -> Accelerator:
    """This process, alone or among those that `accelerate launch` started; `on_cpu`, whatever else there is.

    Accelerate takes the processes of a machine without an accelerator for strangers unless it is told to use the CPU:
    each of them would evaluate everything.
    """
    return Accelerator(cpu=on_cpu or not torch.accelerator.is_available())


def is_main() -> bool:
    """Whether this process writes and prints for all."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def tell(message: str) -> None:
    """Print a note, once for all processes, to standard error: results go to standard output."""
    if is_main():
        print(message, file=sys.stderr)


Module = TypeVar("Module", bound=nn.Module)
ReadTensor = Callable[[], Tensor]
"""Reads a whole parameter, on the CPU."""


def fill(model: Module, values: Mapping[str, ReadTensor], device: torch.device) -> Module:
    """Give a model on the meta device its values on one device, one parameter at a time."""
    model = model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name]())
    return model


def place(
    model: nn.Module,
    values: Mapping[str, ReadTensor],
    dtype: torch.dtype,
    accelerator: Accelerator,
    max_memory_gb: float | None = None,
) -> nn.Module:
    """Give a model on the meta device its values, one parameter at a time, and put it where it computes.

    A model that the device has no room for is spread by Accelerate: over all devices of this process, then host memory,
    then files that vanish with the process.

    Args:
        values: by the names of the parameters.
        dtype: of the weights.
        max_memory_gb: memory (10**9 bytes) of each device that weights may take; by default 80 % of what is free.

    Raises `RecipeError` where nothing of the model fits.
    """
    model = model.to(dtype).eval()
    size = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    limits = _limits(accelerator, max_memory_gb)
    if size <= next(iter(limits.values())):
        return fill(model, values, accelerator.device)
    return _spread(model, values, dtype, limits)


def _limits(accelerator: Accelerator, max_memory_gb: float | None) -> dict[int | str, int]:
    """Bytes that weights may take of each device of this process, its own one first, and of host memory."""
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
    whole = {type(module).__name__ for module in model.modules() if _computes_with_its_own(module)}
    try:
        places = infer_auto_device_map(model, {**limits}, no_split_module_classes=sorted(whole), dtype=dtype)
    except (ValueError, RuntimeError) as error:
        raise RecipeError(f"the model cannot be spread over {_listed(limits)}: {error}") from None
    if first not in places.values():
        raise RecipeError(f"no part of the model fits into {limits[first] / 1e9:.2f} GB of {first}")
    modules = {name for name, _ in model.named_modules()}
    # Tensors of the model itself are used by its own forward, which no hook precedes.
    places = {name: place if name in modules else first for name, place in places.items()}
    folder = tempfile.TemporaryDirectory(prefix="vitscale-offload-")
    offloaded: dict[str, dict] = {}
    for name in dict(model.named_parameters()):
        place = places[_covering(name, places)]
        value = values[name]().to(dtype)
        if place == "disk":
            offload_weight(value, name, folder.name, offloaded)
        else:
            _put(model, name, value.to(place))
    if offloaded:
        save_offload_index(offloaded, folder.name)
    tell(f"the model takes more than {_listed(limits)}: it is spread over {', '.join(map(str, _order(places)))}")
    with _without_warnings():
        model = dispatch_model(model, places, main_device=first, offload_dir=folder.name)
    object.__setattr__(model, "offload_folder", folder)  # which lives as long as the model does
    return model


def _computes_with_its_own(module: nn.Module) -> bool:
    """Whether a module has both parameters of its own and modules: it is not split."""
    return any(True for _ in module.parameters(recurse=False)) and any(True for _ in module.children())


def _covering(name: str, places: Mapping[str, int | str]) -> str:
    while name not in places:
        name = name.rpartition(".")[0]
    return name


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, nn.Parameter(value, requires_grad=False))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Of tensors that are no modules, and of weights that are on the disk, which is what was asked for."""
    log = logging.getLogger("accelerate.big_modeling")
    level = log.level
    log.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
    log.setLevel(level)


def _order(places: Mapping[str, int | str]) -> list[int | str]:
    return list(dict.fromkeys(places.values()))


def _listed(limits: Mapping[int | str, int]) -> str:
    return ", ".join(f"{size / 1e9:.2f} GB of {name}" for name, size in limits.items())
