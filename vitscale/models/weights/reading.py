"""Reads our parameters from a source: every key accounted for, one parameter computed at a time."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitscale.ground.errors import CheckpointError
from vitscale.models.model import Model
from vitscale.models.weights.foreign import HEAD, Resampling, table, their_shapes
from vitscale.models.weights.rules import Rule
from vitscale.models.weights.source import Entry, Source

Report = Callable[[str], None]

# Keys that only a head has: what may be left unread. transformers' pooler is the authors' pre_logits.
_HEAD_KEYS = {
    "safetensors": ("head.", "pre_logits.", "head_dist."),
    "npz": ("head/", "pre_logits/", "resnet/head/"),
    "timm": ("head.", "pre_logits.", "head_dist."),
    "hf": ("classifier.", "vit.pooler.", "deit.pooler.", "cls_classifier.", "distillation_classifier."),
}


def has_head(source: Source) -> bool:
    """Whether a source holds anything that only a head has."""
    return any(key.startswith(_HEAD_KEYS[source.form]) for key in source.entries)


@dataclass(frozen=True)
class Reader:
    """How to read one of our parameters; calling it gives the whole: fp32, on the CPU, in the model's shape.

    Args:
        keys: the keys of the source that it is made of.
        is_resampled: whether these are position embeddings of another resolution.
        read: the whole tensor.
        piece: (start, length) -> those elements of the flattened parameter without the others; None where it has to be
            read whole.
        compares: whether reading it raises `CheckpointError` for other values in the source: see `Rule`.
    """

    keys: tuple[str, ...]
    is_resampled: bool
    read: Callable[[], Tensor]
    piece: Callable[[int, int], Tensor] | None
    compares: bool = False

    def __call__(self) -> Tensor:
        return self.read()


def parameters(
    model: Model,
    source: Source,
    drop: Collection[str] = (),
    report: Report = print,
    *,
    resample: bool = True,
    advice: str = "leave the head out: --drop-head",
) -> dict[str, Reader]:
    """How to read each of our parameters, by name.

    Args:
        model: holds the shapes; its values, if it has any, are not looked at.
        source: the weights, of any format.
        drop: the parameters of `HEAD` not to be read; if any, all else that the source has of a head is left unread
            too.
        report: called with what is worth knowing: positions resampled, a head of zeros, what else the source has.
        resample: whether position embeddings of another resolution are resampled (section 3.2).
        advice: ends an error's message if the head alone has caused it.

    Raises `CheckpointError` listing every key that is missing, unexpected or of another shape, and `RecipeError` if the
    format cannot hold the model.
    """
    names = [name for name, _ in model.named_parameters() if name not in drop]
    rules = {rule.ours: rule for rule in table(model, source.form) if rule.ours in names}
    resampled = {name: how for name, rule in rules.items() if resample and (how := _resampling(model, source, rule))}
    if problems := _problems(model, source, rules, names, resampled, bool(drop)):
        listed = "\n".join(f"  {text}" for _, text in problems)
        of_head = all(key in HEAD or key.startswith(_HEAD_KEYS[source.form]) for key, _ in problems)
        raise CheckpointError(
            f"{source.path} ({source.form}) is of another model:\n{listed}" + (f"\n{advice}" if of_head else "")
        )
    for note in (*source.notes, *source.seen_otherwise):
        report(f"{source.path}: {note}")
    return {name: _reader(source, source.entries, rules[name], resampled.get(name), report) for name in names}


def parameters_beside(objective: nn.Module, rules: Sequence[Rule], source: Source) -> dict[str, Reader]:
    """How to read what an objective adds to its model, by name, from what a source holds `beside` a model.

    `rules` has one for each parameter that the objective adds. Raises `CheckpointError` as `parameters`.
    """
    if problems := _differences(their_shapes(objective, rules), source.beside):
        listed = "\n".join(f"  {text}" for _, text in problems)
        raise CheckpointError(f"{source.path} ({source.form}) is of another objective:\n{listed}")
    return {rule.ours: _reader(source, source.beside, rule, None, lambda note: None) for rule in rules}


def load_weights(model: Model, source: Source, drop: Collection[str] = (), report: Report = print) -> None:
    """Give a model that holds whole parameters, in any dtype, the values of a source; see `parameters`.

    Parameters in `drop` keep their values.
    """
    readers = parameters(model, source, drop, report)
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, read in readers.items():
            ours[name].copy_(read())


def _problems(
    model: Model, source: Source, rules: dict[str, Rule], names: list[str], resampled: Collection[str], drops_head: bool
) -> list[tuple[str, str]]:
    """(name in the table, what is wrong) of every key that does not fit."""
    expected = their_shapes(model, rules.values())
    resizable = {rules[name].theirs[0] for name in resampled}
    entries = source.entries
    if drops_head:
        of_head = _HEAD_KEYS[source.form]
        entries = {key: entry for key, entry in entries.items() if key in expected or not key.startswith(of_head)}
    homeless = [(name, f"missing {name}: this format has no place for it") for name in names if name not in rules]
    return homeless + _differences(expected, entries, resizable)


def _differences(
    expected: Mapping[str, tuple[int, ...]], entries: Mapping[str, Entry], resizable: Collection[str] = ()
) -> list[tuple[str, str]]:
    """(name in the table, what is wrong) of every key that is missing, unexpected or of another shape."""
    problems = []
    for key, shape in expected.items():
        entry = entries.get(key)
        if entry is None:
            problems.append((key, f"missing {key} {shape}"))
        elif entry.shape != shape and key not in resizable:
            problems.append((key, f"{entry.key} has shape {entry.shape}, the model's is {shape}"))
    return problems + [
        (key, f"unexpected {entry.key} {entry.shape}") for key, entry in entries.items() if key not in expected
    ]


def _resampling(model: Model, source: Source, rule: Rule) -> Resampling | None:
    entry = source.entries.get(rule.theirs[0])
    return None if entry is None else model.foreign().resampling(rule.ours, entry.shape, source.form)


def _reader(
    source: Source, entries: Mapping[str, Entry], rule: Rule, resampling: Resampling | None, report: Report
) -> Reader:
    def read() -> Tensor:
        value = rule.join(tuple(entries[key].read() for key in rule.theirs))
        if rule.ours == "head.weight" and not value.any():
            report(f"{source.path}: every weight of the head is zero, as in the released ImageNet-21k originals")
        if resampling is None:
            return value.contiguous()
        report(f"{source.path}: {rule.ours} resampled from {resampling.old} to {resampling.new} positions")
        return resampling.resample(value)

    piece = entries[rule.theirs[0]].piece if rule.renames and resampling is None else None
    return Reader(rule.theirs, resampling is not None, read, piece, rule.compares)
