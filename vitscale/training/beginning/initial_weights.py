"""Weights taken from another run or from a file: `init` in a recipe, and the teacher that a run learns from.

Every parameter comes from exactly one place: the weights, as they are or resampled; zero; or its initial value.
Anything else that the weights hold is an error, except a head that the recipe does not keep.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitscale.ground.errors import CheckpointError, RecipeError, VitscaleError
from vitscale.ground.ranks import on_rank_zero
from vitscale.ground.wording import counted, shortened
from vitscale.models import Model, initialise, weight_dtype
from vitscale.models.weights import FUNCTIONS, HEAD, Reader, load_weights, parameters, parameters_beside, recognised
from vitscale.models.weights.source import MASK
from vitscale.objectives import Objective, build_objective, build_teacher
from vitscale.objectives.tokenizer import files_of, load_tokenizer, open_tokenizer
from vitscale.recipe import MAE, Dino, Recipe, Teacher, families, read_recipe, validate_recipe
from vitscale.recipe.masked_patches import MaskedPatches, Tokenizer
from vitscale.runs.checkpoint import checkpoint_directory
from vitscale.runs.checkpoint.opening import OpenWeights
from vitscale.runs.directory import read_newest
from vitscale.runs.names import RECIPE_FILE
from vitscale.training.beginning.found_weights import (
    Named,
    check_classes,
    check_model,
    digests,
    find_weights,
    in_yaml,
    open_found,
)
from vitscale.training.deepspeed.distributed import World
from vitscale.training.deepspeed.fragments import Source as FragmentSource
from vitscale.training.deepspeed.fragments import in_pieces

_OUTPUT_LAYERS = ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")
_TEACHER, _TOKENIZER = Teacher.key, "objective.targets"
_TEACHERS_HEAD = "the head of the teacher is needed, with the classes of data.train"
_ADVICE = "leave the whole head out, as for fine-tuning: model.head: linear and init.head: zero"
_ADVICE_WITHOUT_LABELS = "leave the head out, as this run has none: init.head: zero"


def settle_functions(recipe: Recipe, run_dir: Path) -> tuple[Recipe, str | None]:
    """The recipe with the form of GELU and the epsilon of the weights that it begins with, where it leaves them open,
    and what was taken, in words. A run keeps what it began with.

    Raises `RecipeError` and `CheckpointError` as `check_initial_weights`.
    """
    left = [
        key
        for key in sorted(FUNCTIONS)
        if isinstance(recipe.model, families.ViT) and getattr(recipe.model, key) is None
    ]
    if recipe.init is None or recipe.init.continues or not left:
        return recipe, None
    saved = run_dir / RECIPE_FILE
    if saved.exists():
        source: families.Model | None = read_recipe(saved).model
    else:
        weights = find_weights(recipe.init)
        if weights.description is None:
            weights = replace(weights, description=recognised(weights.source))
        source = weights.model
    if not isinstance(source, families.ViT):
        return recipe, None
    ours, theirs = asdict(recipe.model.shape()), asdict(source.shape())
    taken = {key: theirs[key] for key in left if ours[key] != theirs[key] and "swiglu" not in (ours[key], theirs[key])}
    if not taken:
        return recipe, None
    content = recipe.dump()
    content["model"] |= taken
    words = f"model {', '.join(f'{key} {value}' for key, value in taken.items())}, as the weights of init.from have it"
    return validate_recipe(content, f"with {words}, the recipe"), None if saved.exists() else words


def check_initial_weights(recipe: Recipe, class_names: list[str], run_dir: Path) -> None:
    """Check `init` by names and shapes alone, before the ranks meet; for branches see `check_branch`.

    Nothing is looked at for a run that has a checkpoint, since it no longer needs its initial weights.

    Raises `RecipeError` if there are no such weights or they contradict the recipe, and `CheckpointError` if they are
    damaged or of another model.
    """
    if recipe.init is None or recipe.init.continues or has_begun(recipe, run_dir):
        return
    _Assignment(recipe, class_names, find_weights(recipe.init))


def initial_source(
    recipe: Recipe, class_names: list[str], initial: FragmentSource, world: World, say: Callable[[str], None]
) -> tuple[FragmentSource, dict[str, Any] | None]:
    """Where a run that has no checkpoint yet takes its weights from; all ranks call it together.

    Args:
        initial: the initial value of every parameter.
        say: prints what is taken from where, on rank 0.

    Returns:
        The source for `Engine.load`, and what identifies the weights, for the index of the run's checkpoints: their
        format, or step and kind, and the sha256 of each file; None if the recipe has no `init`.

    Raises as `check_initial_weights`, and `CheckpointError` if no checkpoint of a run verifies; the source raises it
    for values that are not finite.
    """
    named = recipe.init
    if named is None:
        return initial, None
    weights = open_found(named, world, say)
    try:
        assignment = _Assignment(recipe, class_names, weights)
    except VitscaleError as error:
        raise error.on_all_ranks() from None
    for note in assignment.notes:
        say(f"{weights.source.path}: {note}")
    say(assignment.describe())
    whole = in_pieces(lambda name: assignment.readers[name]())

    def read(kind: str, name: str, start: int, length: int) -> Tensor:
        if name in assignment.zeros:
            return torch.zeros(length)
        reader = assignment.readers.get(name)
        if reader is None:
            return initial(kind, name, start, length)
        values = whole(kind, name, start, length) if reader.piece is None else reader.piece(start, length)
        _check_finite(named, weights, name, values)
        return values

    return read, weights.identity


def _check_finite(named: Named, weights: OpenWeights, name: str, values: Tensor) -> None:
    if not values.isfinite().all():
        raise CheckpointError(
            f"{named.key}.from: {name} of {weights.title} holds values that are NaN or infinite, which makes losses "
            "NaN, too: the file is damaged, or its training had diverged: take another one, or an earlier step"
        )


def has_begun(recipe: Recipe, run_dir: Path) -> bool:
    """Whether a run has a checkpoint already, as far as can be told."""
    if read_newest(run_dir) is not None:
        return True
    with suppress(OSError):  # the run itself will say that it cannot read its checkpoints
        return bool(checkpoint_directory(recipe, run_dir).steps())
    return False


class _Assignment:
    """Where each parameter comes from; nothing is read yet. Raises as `check_initial_weights`."""

    def __init__(self, recipe: Recipe, class_names: list[str], weights: OpenWeights) -> None:
        if recipe.init is not None and recipe.init.head != "keep":
            recipe = _pooled_as(weights, recipe)
        init = recipe.init
        assert init is not None
        self._weights = weights
        with torch.device("meta"):
            objective = build_objective(recipe, len(class_names))
        model = objective.backbone
        names = [name for name, _ in model.named_parameters()]
        drop = [] if init.head == "keep" else list(_OUTPUT_LAYERS)  # theirs goes if ours has none, too
        # No format but these two has a place for the layer `pre_logits`.
        may_have_it = weights.source.form in ("safetensors", "npz")
        has_pre_logits = may_have_it and any(key.startswith("pre_logits") for key in weights.source.entries)
        if init.head == "initial" and not has_pre_logits:
            drop = list(HEAD)
        advice = _ADVICE if "head.weight" in names else _ADVICE_WITHOUT_LABELS
        self.readers: dict[str, Reader] = parameters(  # of what is taken
            model, weights.source, drop, report=lambda note: None, resample=init.positions == "resample", advice=advice
        )
        beside = _beside(recipe, objective, weights)
        self.readers |= beside
        taken = {f"{key} is not read" for reader in beside.values() for key in reader.keys}
        self.notes = [note for note in weights.source.notes if note.partition(":")[0] not in taken]  # for people
        if beside and isinstance(recipe.objective, MAE):
            self.notes += _other_pixels(recipe.objective, weights)
        for reader in self.readers.values():
            if reader.compares:  # now, not when the ranks have met
                reader()
        self.zeros = frozenset(name for name in names if name in drop and init.head == "zero")
        self.fresh = [name for name in names if name in drop and name not in self.zeros]  # as without `init`
        added = [name for name, _ in objective.named_weights() if name not in names and name not in self.readers]
        self.fresh += dict.fromkeys(name.partition(".")[0] for name in added)  # what the objective adds
        normalise = recipe.data.normalise
        check_model(init, weights, recipe.model, "the recipe's", normalise, "data.normalise")
        if weights.normalise is None:
            self.notes.append(f"does not say how its images are normalised; here they are by {in_yaml(normalise)}")
        if init.head == "keep":
            check_classes(weights, class_names, "init.head: keep", "use init.head: zero, or ")

    def describe(self) -> str:
        """One line for people."""
        resampled = sum(reader.is_resampled for reader in self.readers.values())
        parts = [f"{counted(len(self.readers) - resampled, 'tensor')} taken"]
        parts += [f"{resampled:,} resampled"] if resampled else []
        parts += [f"{layer} zero" for layer in _layers(sorted(self.zeros))]
        parts += [f"{layer} initial" for layer in _layers(self.fresh)]
        used = {key for reader in self.readers.values() for key in reader.keys}
        left = _layers([entry.key for key, entry in self._weights.source.entries.items() if key not in used])
        parts += [f"left out: {', '.join(left)}"] if left else []
        return f"weights from {self._weights.title}: {', '.join(parts)}"


def _pooled_as(weights: OpenWeights, recipe: Recipe) -> Recipe:
    """The recipe with the pooling of the weights, if that changes no parameter: formats name parameters by it.

    A class token and the normed mean of the patches are read from the same tokens, and a new head may read either.
    """
    model = recipe.model
    if not isinstance(model, families.ViT) or not model.has_class_token:
        return recipe
    is_of_cls = "fc_norm.weight" not in weights.source.entries
    theirs = ("cls" if is_of_cls else "normed_mean") if weights.model is None else weights.model.pool_or_default()
    if theirs not in ("cls", "normed_mean"):
        return recipe
    return recipe.model_copy(update={"model": model.model_copy(update={"pool": theirs})})


def _beside(recipe: Recipe, objective: Objective, weights: OpenWeights) -> dict[str, Reader]:
    """How to read what the objective adds to the model; empty if the weights hold none for such an objective."""
    ours, theirs = recipe.objective, None if weights.recipe is None else weights.recipe.objective
    source, rules = weights.source, objective.rules(weights.source.form)
    if isinstance(ours, Dino) and source.form == "hf":  # a mask, which is among the model's own tensors there
        masks = {key: source.entries[key] for rule in rules for key in rule.theirs if key in source.entries}
        source = replace(source, beside=masks)
    if source.form == "timm" and (source.beside.keys() == {MASK}) != isinstance(ours, Dino):
        return {}  # a mask is no decoder, and a decoder no mask
    if not source.beside or (theirs is not None and theirs.kind != ours.kind):
        return {}
    if rules and isinstance(ours, MAE):
        heads = theirs.decoder_heads if isinstance(theirs, MAE) else None
        heads = weights.source.config.get("decoder_num_attention_heads", heads)
        if heads not in (None, ours.decoder_heads):  # which no shape shows
            raise RecipeError(
                f"objective.decoder_heads is {ours.decoder_heads}, and the decoder of {weights.title} has "
                f"{shortened(repr(heads))}"
            )
    return parameters_beside(objective, rules, source) if rules else {}


def _other_pixels(ours: MAE, weights: OpenWeights) -> list[str]:
    """What to know of a decoder that learned other targets, which no shape shows."""
    theirs = None if weights.recipe is None else weights.recipe.objective
    norm_pix = weights.source.config.get("norm_pix_loss", theirs.norm_pix if isinstance(theirs, MAE) else None)
    if norm_pix in (None, ours.norm_pix):
        return []
    return [
        f"its decoder predicts pixels with norm_pix {str(bool(norm_pix)).lower()}, and objective.norm_pix is "
        f"{str(ours.norm_pix).lower()}: the loss begins high"
    ]


def _layers(keys: list[str]) -> list[str]:
    """The layers that keys of any format belong to, in their order."""
    return list(dict.fromkeys(re.sub(r"[./](weight|bias|kernel|scale)$", "", key) for key in keys))


def check_teacher(recipe: Recipe, class_names: list[str]) -> None:
    """Check the teacher, or a tokenizer, by names and shapes alone, before the ranks meet.

    Raises `RecipeError` if there are no such weights or they contradict the recipe, and `CheckpointError` if they are
    damaged or of another model.
    """
    named = recipe.objective.learns_from
    if named is not None and (num_classes := named.model.num_classes) not in (None, len(class_names)):
        raise RecipeError(
            f"{_TEACHER}.model.num_classes is {num_classes}, but data.train has {len(class_names)} classes, and the "
            "teacher's are the same; leave it out"
        )
    if (tokenizer := _tokenizer(recipe)) is not None:
        open_tokenizer(*tokenizer)
    if named is not None and named.source is not None:
        with torch.device("meta"):
            teacher = build_teacher(recipe, len(class_names))
        assert teacher is not None
        _check_teacher(recipe, class_names, named, find_weights(named), teacher)


def load_teacher(
    recipe: Recipe, class_names: list[str], world: World, say: Callable[[str], None]
) -> tuple[torch.nn.Module | None, dict[str, Any] | None]:
    """The teacher, whole on this rank's device and in the run's dtype, never updated; all ranks call it together. For
    `objective.targets` it is the tokenizer, in fp32.

    `say` prints what is taken from where, on rank 0. Returns the teacher, or None without one; and what identifies its
    weights, None without a source.

    Raises as `check_teacher`, and `CheckpointError` if no checkpoint of a run verifies.
    """
    if (tokenizer := _tokenizer(recipe)) is not None:
        try:
            loaded = load_tokenizer(*tokenizer, world.device)
        except VitscaleError as error:
            raise error.on_all_ranks() from None
        say(f"tokenizer: {tokenizer[0].path} of {tokenizer[0].source}")
        files = on_rank_zero(lambda: [digests(file) for file in files_of(tokenizer[0])])
        return loaded, {"tokenizer": tokenizer[0].path, "files": files[0] | files[1]}
    teacher = build_teacher(recipe, len(class_names))
    if teacher is None:
        return None, None
    named, identity = recipe.objective.learns_from, None
    if named is None or named.source is None:
        initialise(teacher, recipe.seed)
        say(
            "WARNING: objective.teacher has no from: its weights are random initial values, from which "
            "nothing can be learned"
        )
    else:
        weights = open_found(named, world, say)
        try:
            _check_teacher(recipe, class_names, named, weights, teacher)
            load_weights(teacher, weights.source, report=lambda note: None)
            for name, values in teacher.state_dict().items():
                _check_finite(named, weights, name, values)
        except VitscaleError as error:
            raise error.on_all_ranks() from None
        for note in weights.source.notes:
            say(f"{weights.source.path}: {note}")
        say(f"teacher: {weights.title}")
        identity = weights.identity
    return teacher.to(device=world.device, dtype=weight_dtype(recipe)).requires_grad_(False), identity


def check_same_teacher(now: dict[str, Any] | None, before: dict[str, Any] | None) -> None:
    """Raise `CheckpointError` if a resumed run has another teacher than the checkpoint that it continues from."""
    if now == before:
        return
    files = {name: digest for each in (now, before) if each is not None for name, digest in each["files"].items()}
    key, whose = (_TEACHER, "teacher") if "tokenizer" not in (now or before or {}) else (_TOKENIZER, "tokenizer")
    raise CheckpointError(
        f"{key}.from: the {whose}'s weights are not those that this run has learned from so far "
        f"({', '.join(sorted(files)) or 'initial values'}); use those again, or start another run"
    ).on_all_ranks()


def _tokenizer(recipe: Recipe) -> tuple[Tokenizer, int] | None:
    """The tokenizer that a recipe names, and the patches along one side of its model's images."""
    settings, patches = recipe.objective, recipe.model.patches(recipe.data.image_size)
    if not isinstance(settings, MaskedPatches) or settings.targets is None:
        return None
    assert patches is not None, "the objective's own check"
    return settings.targets, patches.grid


def _check_teacher(
    recipe: Recipe, class_names: list[str], named: Teacher, weights: OpenWeights, teacher: Model
) -> None:
    parameters(teacher, weights.source, report=lambda note: None, advice=_TEACHERS_HEAD)
    normalise = named.normalise or recipe.data.normalise
    check_model(named, weights, named.model, f"{_TEACHER}.model's", normalise, f"{_TEACHER}.normalise")
    check_classes(weights, class_names, f"{_TEACHER}.from", "a teacher names the classes of ")
