"""Frozen tokenizers of images, which name each patch by a number: what BEiT predicts (Bao et al., 2022).

The class is of another package that the user has allowed, the folder beside it a stranger's: of config.json only the
keys count that the class's own configuration has, and of the weights only safetensors.

Shape legend: B batch, S side in pixels, N patches.
"""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_parameter_registration_hook

from vitscale.ground.errors import CheckpointError, RecipeError, turned
from vitscale.ground.extensions import outside_class
from vitscale.ground.wording import shortened
from vitscale.models.layers import CHANNELS
from vitscale.models.weights.source import Entry, read_json
from vitscale.models.weights.torch_files import CONFIG, WEIGHTS, read_safetensors
from vitscale.objectives.masked_patches import whole_pixels
from vitscale.recipe.masked_patches import Tokenizer

_KEY = "objective.targets"
_MOST = 4096  # that a whole number in config.json may be if no side of a tensor is longer
_PARAMETERS = 64  # that a class may register besides twice the tensors: some are replaced while it is built


class PatchTokenizer(nn.Module):
    """Names the patches of images by a tokenizer's numbers, in fp32.

    Args:
        settings: the recipe's block.
        grid: patches of the model along one side.
        network: the tokenizer.

    Raises `RecipeError` if its numbers are not those of the recipe.
    """

    def __init__(self, settings: Tokenizer, grid: int, network: nn.Module) -> None:
        super().__init__()
        self.settings, self.network = settings, network.eval().requires_grad_(False)
        size, found = settings.image_size, getattr(getattr(network, "config", None), "vocab_size", None)
        if found != settings.vocabulary:
            raise RecipeError(
                f"{_KEY}.vocabulary is {settings.vocabulary}, and vocab_size of the tokenizer in {settings.source} is "
                f"{shortened(repr(found))}"
            )
        try:
            shape = tuple(self._numbers(torch.empty(1, CHANNELS, size, size, device="meta")).shape)
        except Exception as error:  # of a class that may raise anything
            raise RecipeError(
                f"{_KEY}.image_size {size}: {settings.path} refuses images of {size} pixels: "
                f"{type(error).__name__}: {shortened(str(error))}"
            ) from None
        if shape not in ((1, grid, grid), (1, grid**2)):
            raise RecipeError(
                f"{_KEY}.image_size {size}: the tokenizer gives {' x '.join(map(str, shape[1:]))} numbers for such an "
                f"image, and the model cuts {grid} x {grid} patches; there has to be one for each"
            )

    def _numbers(self, pixels: Tensor) -> Tensor:
        numbers: Tensor = self.network.get_codebook_indices(pixels)  # type: ignore[operator]
        return numbers

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """The numbers int64 (B, N), row by row, of images (B, S, S, 3) in [-1, 1]."""
        settings, pixels = self.settings, whole_pixels(images).permute(0, 3, 1, 2) / 255
        size = (settings.image_size, settings.image_size)
        if pixels.shape[2:] != size:
            pixels = F.interpolate(pixels, size, mode="bicubic", antialias=True).clamp(0, 1)
        mean, std = (
            torch.tensor(each, device=pixels.device)[:, None, None]
            for each in (settings.normalise.mean, settings.normalise.std)
        )
        return self._numbers((pixels - mean) / std).flatten(1).long()


def open_tokenizer(settings: Tokenizer, grid: int) -> PatchTokenizer:
    """The tokenizer on the meta device, compared with its weights by names and shapes; for arguments see
    `PatchTokenizer`.

    Raises `RecipeError` if its class is not allowed or there, or if it does not fit the recipe, and `CheckpointError`
    for a folder without such a tokenizer.
    """
    entries, said = _content(settings)
    file, weights = files_of(settings)
    with turned(f"{_KEY}.path", RecipeError, ValueError):
        made = outside_class(settings.path)
        configuration: Any = getattr(made, "config_class", None)
        has_parts = isinstance(configuration, type) and hasattr(made, "get_codebook_indices")
        if not (has_parts and issubclass(made, nn.Module)):
            raise ValueError(f"{settings.path}: expected a module with config_class and get_codebook_indices")
    known = inspect.get_annotations(configuration)
    config = {key: value for key, value in said.items() if key in known}
    most = max([_MOST, len(entries), *(side for entry in entries.values() for side in entry.shape)])
    if wrong := [key for key, value in config.items() if not _is_bounded(value, most)]:
        raise CheckpointError(
            f"{_KEY}.from: {file}: {wrong[0]} is {shortened(repr(config[wrong[0]]))}; expected text or a "
            f"number up to {most:,}: no side of a tensor beside it is longer"
        )
    try:
        with torch.device("meta"), _at_most(2 * len(entries) + _PARAMETERS):
            network = made(configuration(**config))
    except Exception as error:  # of a class that may raise anything
        raise CheckpointError(
            f"{_KEY}.from: {file}: {settings.path} cannot be built from it: {type(error).__name__}: "
            f"{shortened(str(error))}"
        ) from None
    wanted = {name: tuple(value.shape) for name, value in (*network.named_parameters(), *network.named_buffers())}
    found = {name: entry.shape for name, entry in entries.items()}
    if differing := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        name = differing[0]
        raise CheckpointError(
            f"{_KEY}.from: {weights}: {shortened(repr(name))} is {found.get(name, 'not there')}, and "
            f"{settings.path} has {wanted.get(name, 'none')}"
        )
    return PatchTokenizer(settings, grid, network)


@contextmanager
def _at_most(parameters: int) -> Iterator[None]:
    """Refuse to build modules with more parameters: of a few bytes' number of layers a class may build for hours."""
    left = parameters

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {parameters:,} parameters, many more than the tensors beside it")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def load_tokenizer(settings: Tokenizer, grid: int, device: torch.device) -> PatchTokenizer:
    """The tokenizer with its values on a device. Raises as `open_tokenizer`."""
    tokenizer = open_tokenizer(settings, grid)
    values = {name: entry.read() for name, entry in _content(settings)[0].items()}
    if broken := [name for name, value in values.items() if not value.isfinite().all()]:
        raise CheckpointError(f"{_KEY}.from: {files_of(settings)[1]}: {broken[0]} holds values that are not finite")
    tokenizer.network.load_state_dict(values, assign=True)
    return tokenizer.requires_grad_(False).to(device)


def files_of(settings: Tokenizer) -> tuple[Path, Path]:
    """The configuration and the weights in the folder that a recipe names."""
    folder = Path(os.path.expanduser(settings.source))  # noqa: PTH111 (without an error where there is no home)
    return folder / CONFIG, folder / WEIGHTS


def _content(settings: Tokenizer) -> tuple[dict[str, Entry], dict[str, Any]]:
    config, weights = files_of(settings)
    if missing := [file.name for file in (config, weights) if not file.is_file()]:
        raise CheckpointError(
            f"{_KEY}.from: {str(config.parent)[:200]}: no {' and no '.join(missing)} there; expected a folder as "
            "transformers' save_pretrained writes it, with safetensors"
        )
    with turned(f"{_KEY}.from", CheckpointError, CheckpointError):
        return read_safetensors(weights)[0], read_json(config)


def _is_bounded(value: object, most: int) -> bool:
    return value is None or isinstance(value, str) or (isinstance(value, (int, float)) and abs(value) <= most)
