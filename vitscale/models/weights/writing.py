"""From our parameters to a file or folder of any format, one parameter in memory at a time."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from vitscale.durable import durable_file, sync_folder, write_text
from vitscale.errors import CheckpointError, RecipeError
from vitscale.models.vit import ViT
from vitscale.models.weights import huggingface
from vitscale.models.weights.description import METADATA_KEY, Description
from vitscale.models.weights.npz import write_npz
from vitscale.models.weights.rules import Format, Rule
from vitscale.models.weights.table import HEAD, table, their_shapes
from vitscale.models.weights.torch_files import SAFETENSORS, write_safetensors

_SUFFIX: dict[Format, str] = {"safetensors": SAFETENSORS, "npz": ".npz", "timm": SAFETENSORS, "hf": ""}


def write_weights(
    out: Path,
    form: Format,
    description: Description,
    parameter: Callable[[str], Tensor],
    drop_head: bool = False,
) -> int:
    """Write the weights of a model; the number of values written.

    Args:
        out: the file, or for hf the folder. Complete or absent: it is written aside and renamed.
        form: the format.
        description: the model, its image size and classes.
        parameter: our parameter's name -> its whole tensor, fp32 on the CPU; asked once for each.
        drop_head: leave the output layer and `pre_logits` out.

    Raises `RecipeError` where the format cannot hold the model, where `out` ends otherwise than the format does, or
    where it exists; an empty folder may be there for hf.
    """
    if drop_head:
        description = replace(description, num_classes=None, class_names=None)
    model = description.build()
    rules = [rule for rule in table(model, form) if not (drop_head and rule.ours in HEAD)]
    held = {rule.ours for rule in rules} | (set(HEAD) if drop_head else set())
    if homeless := [name for name, _ in model.named_parameters() if name not in held]:
        raise RecipeError(
            f"format {form} holds one linear layer as the head, and this model has {', '.join(homeless)}: a "
            f"pre-training head; leave the head out with --drop-head, or use safetensors or npz"
        )
    shapes = their_shapes(model, rules)
    try:
        _check_out(out, form)
        out.parent.mkdir(parents=True, exist_ok=True)
        if form == "hf":
            assert isinstance(model, ViT)
            _write_folder(out, model, shapes, _stream(rules, parameter), description)
        else:
            with durable_file(out) as file:
                if form == "npz":
                    write_npz(file, _stream(rules, parameter))
                else:
                    metadata = {METADATA_KEY: description.to_json()} if form == "safetensors" else {"format": "pt"}
                    write_safetensors(file, shapes, _stream(rules, parameter), metadata)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error}") from None
    return sum(map(math.prod, shapes.values()))


def _stream(rules: list[Rule], parameter: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    for rule in rules:
        yield from zip(rule.theirs, rule.split(parameter(rule.ours)), strict=True)


def _check_out(out: Path, form: Format) -> None:
    if form != "hf" and out.suffix != _SUFFIX[form]:
        raise RecipeError(f"--out {out}: format {form} is a file that ends in {_SUFFIX[form]}")
    if out.name in ("", ".."):
        raise RecipeError(f"--out {out}: name a folder that is to be made")
    is_empty_folder = out.is_dir() and not any(out.iterdir())
    if out.exists() and not (form == "hf" and is_empty_folder):
        raise RecipeError(f"--out {out}: is there already; nothing is overwritten")


def _write_folder(
    out: Path,
    model: ViT,
    shapes: dict[str, tuple[int, ...]],
    tensors: Iterator[tuple[str, Tensor]],
    description: Description,
) -> None:
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    try:
        part.mkdir()
        content = huggingface.configuration(model, description.num_classes or 0, description.class_names)
        for name, block in content.items():
            write_text(part / name, json.dumps(block, indent=2, ensure_ascii=False) + "\n")
        with durable_file(part / huggingface.WEIGHTS) as file:
            write_safetensors(file, shapes, tensors, {"format": "pt"})
        part.replace(out)
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
