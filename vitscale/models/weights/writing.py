"""Writes our parameters to a file or folder of any format, one parameter in memory at a time."""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.ground.files.durable import durable_file, durable_folder, make_folder, write_text
from vitscale.ground.weight_formats import Format
from vitscale.ground.wording import listed
from vitscale.models.model import Model
from vitscale.models.weights import huggingface, timm_hub
from vitscale.models.weights.description import METADATA_KEY, PROBLEM_TYPES, Description
from vitscale.models.weights.foreign import HEAD, Backbone, table, their_shapes
from vitscale.models.weights.npz import write_npz
from vitscale.models.weights.preprocessing import WHOLE_PICTURE
from vitscale.models.weights.reading import Report
from vitscale.models.weights.rules import Rule
from vitscale.models.weights.torch_files import CONFIG, SAFETENSORS, TORCH_SUFFIXES, WEIGHTS, write_safetensors
from vitscale.recipe import Normalise

_SUFFIX: dict[Format, str] = {"safetensors": SAFETENSORS, "npz": ".npz", "timm": SAFETENSORS}
# The system's errors if the name of a new file or folder is taken, except by an empty folder.
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def write_weights(
    out: Path,
    form: Format,
    description: Description,
    parameter: Callable[[str], Tensor],
    drop_head: bool = False,
    report: Report = print,
    readme: Callable[[], str] | None = None,
    *,
    as_backbone: bool = False,
) -> int:
    """Write the weights of a model. Returns the number of values written.

    Args:
        out: the file, or the folder for hf, and for timm unless it ends in `.safetensors`. Complete or absent: it is
            written aside and renamed. Anything that has this name, now or by then, is left as it is.
        form: the format.
        description: the model, its image size and classes.
        parameter: our parameter's name -> its whole tensor, fp32 on the CPU; asked once for each.
        drop_head: leave the output layer and `pre_logits` out.
        report: called with what is worth knowing: values that are not finite, classes of one name.
        readme: gives the text of a folder's README.md; asked once it is certain that the format holds the model.
        as_backbone: for hf: as one of the backbones of transformers, without a head.

    Raises `RecipeError` if the format cannot hold the model, if `out` does not end as the format does, or if it exists
    (for a folder, an empty one may exist), and `CheckpointError` if there is no room.
    """
    if as_backbone and form != "hf":
        raise RecipeError(f"a backbone is a folder of transformers, format hf; {form} holds the model itself")
    if drop_head := drop_head or as_backbone:
        description = replace(description, num_classes=None, class_names=None)
    model = description.build()
    backbone = model.foreign().backbone() if as_backbone else None
    rules = [*backbone.rules] if backbone else table(model, form)
    rules = [rule for rule in rules if not (drop_head and rule.ours in HEAD)]
    held = {rule.ours for rule in rules} | (set(HEAD) if drop_head else set())
    if backbone:  # what comes after the last map
        held |= {name for name, _ in model.named_parameters() if name.startswith(("norm.", "map."))}
    if homeless := [name for name, _ in model.named_parameters() if name not in held]:
        held_head = "one linear layer as the head" if "head.weight" in held else "no head of such a model"
        raise RecipeError(
            f"format {form} holds {held_head}, and this one has {', '.join(homeless)}; leave the head out with "
            "--drop-head, or use safetensors"
        )
    shapes = their_shapes(model, rules)
    count = sum(map(math.prod, shapes.values()))
    tensors = _stream(rules, parameter, report)
    configurations = _configurations(form, model, description, report, backbone) if _is_folder(out, form) else {}
    try:
        _prepare(out, form, 4 * count)
        if configurations:
            content = "" if readme is None else readme()
            with durable_folder(out) as folder:  # over nothing, or an empty folder: the system refuses anything else
                if content:
                    write_text(folder / "README.md", content)
                for name, block in configurations.items():
                    write_text(folder / name, json.dumps(block, indent=2, ensure_ascii=False) + "\n")
                with (folder / WEIGHTS).open("wb") as file:
                    write_safetensors(file, shapes, tensors, {"format": "pt"})
        else:
            with durable_file(out, overwrite=False) as file:
                if form == "npz":
                    write_npz(file, tensors)
                else:
                    metadata = {METADATA_KEY: description.to_json()} | ({"format": "pt"} if form == "timm" else {})
                    write_safetensors(file, shapes, tensors, metadata)
    except OSError as error:
        if error.errno in _TAKEN and os.path.lexists(out):
            raise _taken(out) from None
        raise CheckpointError(f"{out}: cannot be written: {error}") from None
    return count


def _stream(rules: list[Rule], parameter: Callable[[str], Tensor], report: Report) -> Iterator[tuple[str, Tensor]]:
    all_finite = True
    for rule in rules:
        value = parameter(rule.ours)
        if all_finite and not value.isfinite().all():
            all_finite = False
            report(f"{rule.ours} holds values that are NaN or infinite; it is the first one that does")
        yield from zip(rule.theirs, rule.split(value), strict=True)


def loading_lines(out: Path, form: Format, description: Description, *, as_backbone: bool = False) -> list[str]:
    """Python that opens what was written in its own library; empty for formats without one, and where timm has no name.

    It can be copied into an interpreter as it is.

    `description` is that of what was written: without classes where the head was left out.
    """
    if form == "hf":
        return ["import transformers", *huggingface.loading_lines(out, description.build(), as_backbone=as_backbone)]
    lines = timm_hub.loading_lines(out, description.build(), description.num_classes) if form == "timm" else []
    return ["import timm", *lines] if lines else []


def _is_folder(out: Path, form: Format) -> bool:
    return form == "hf" or (form == "timm" and out.suffix != SAFETENSORS)


def _configurations(
    form: Format, model: Model, description: Description, report: Report, backbone: Backbone | None
) -> dict[str, dict[str, Any]]:
    """File name -> content of the JSON files in a folder."""
    crop, normalise = description.eval_crop or WHOLE_PICTURE, description.normalise or Normalise()
    if form == "hf":
        files = huggingface.configuration(model, _labels(description, report), crop, normalise, backbone)
    else:
        labels = _labels(description, report) if description.class_names else None
        files = {CONFIG: timm_hub.configuration(model, description.num_classes, labels, crop, normalise)}
    if description.num_classes is not None and description.loss is not None:
        files[CONFIG]["problem_type"] = PROBLEM_TYPES[description.loss]
    return files


def _labels(description: Description, report: Report) -> list[str]:
    names = description.class_names or [f"LABEL_{i}" for i in range(description.num_classes or 0)]
    labels = huggingface.distinct(names)
    changed = [label for name, label in zip(names, labels, strict=True) if name != label]
    if changed:
        report(f"several classes have one name; {CONFIG} tells them apart by number: {listed(changed)}")
    return labels


def _prepare(out: Path, form: Format, size: int) -> None:
    """Refuse what cannot be written before anything is computed, and make the folders above it."""
    is_folder = _is_folder(out, form)
    if not is_folder and out.suffix != _SUFFIX[form]:
        raise RecipeError(f"--out {out}: format {form} is a file that ends in {_SUFFIX[form]}")
    if is_folder and out.suffix in (SAFETENSORS, ".npz", *TORCH_SUFFIXES):
        also = f", or a file that ends in {SAFETENSORS}" if form == "timm" else ""
        raise RecipeError(f"--out {out}: format {form} is a folder{also}; this is the name of another kind of file")
    if out.name in ("", ".."):
        raise RecipeError(f"--out {out}: name a folder that is to be made")
    is_empty_folder = not out.is_symlink() and out.is_dir() and not any(out.iterdir())
    if os.path.lexists(out) and not (is_folder and is_empty_folder):
        raise _taken(out)
    make_folder(out.parent)
    free = shutil.disk_usage(out.parent).free
    if size > free > 0:  # 0 is also what a file system says that does not know
        raise CheckpointError(f"{out}: {size:,} bytes are needed, and {free:,} are free")


def _taken(out: Path) -> RecipeError:
    return RecipeError(f"{out}: is there already; nothing is overwritten")
