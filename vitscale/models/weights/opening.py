"""Tells the format of a file or folder by its name and its keys."""

from dataclasses import replace
from pathlib import Path

from vitscale.ground.errors import CheckpointError, os_errors
from vitscale.ground.wording import listed
from vitscale.models.weights import huggingface, timm_hub
from vitscale.models.weights.description import METADATA_KEY
from vitscale.models.weights.npz import read_npz
from vitscale.models.weights.source import MASK, Source, read_json
from vitscale.models.weights.torch_files import CONFIG, SAFETENSORS, TORCH_SUFFIXES, read_safetensors, read_torch

# A key that every file of a format has, for Transformers, Swin among them, and for ResNets.
_OURS = {"embedding.weight", "features.root.conv.weight"}
_TIMM = {"patch_embed.proj.weight", "stem.conv.weight"}
# Of the decoder of a whole MAE, in the names of its authors, who share timm's, and in transformers': a key that it has,
# and how all begin.
_DECODERS = {
    "timm": ("decoder_embed.weight", ("decoder_", "mask_token")),
    "hf": ("decoder.decoder_embed.weight", ("decoder.",)),
}


def open_weights(path: Path) -> Source:
    """The weights in a file or folder of any format that we know; nothing but names and shapes is read yet.

    Formats: Google's `.npz`; a folder of transformers' or timm's; `.safetensors`, `.pth`, `.pt` and `.bin` with our
    names, timm's or transformers'.

    Raises `CheckpointError` for what is damaged, pickled or of no known format, saying what was seen.
    """
    with os_errors(f"{path}: cannot be read", CheckpointError):
        return _set_aside(_open(path))


def _set_aside(source: Source) -> Source:
    """The source with an MAE's decoder, or the mask of DINOv2's authors, who share timm's names, beside the model."""
    known, prefixes = _DECODERS.get(source.form, ("", ()))
    if known in source.entries:
        beside = {key: entry for key, entry in source.entries.items() if key.startswith(prefixes)}
        note = "its decoder is part of an objective here: only a run with objective.kind: mae begins with it"
    elif source.form == "timm" and MASK in source.entries:
        beside = {MASK: source.entries[MASK]}
        note = f"{MASK} is not read: a mask is part of an objective here"
    else:
        return source
    entries = {key: entry for key, entry in source.entries.items() if key not in beside}
    return replace(source, entries=entries, beside=beside, notes=(*source.notes, note))


def _open(path: Path) -> Source:
    if path.is_dir():
        if (path / CONFIG).is_file():
            config = read_json(path / CONFIG)
            is_timms = isinstance(config.get("architecture"), str) and "model_type" not in config
            return (timm_hub if is_timms else huggingface).read_folder(path, config)
        seen = listed(sorted(entry.name for entry in path.iterdir())) or "nothing"
        raise CheckpointError(
            f"{path}: a folder of weights has a {CONFIG}, a run's directory a recipe.yaml; this one has {seen}"
        )
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if path.suffix == ".npz":
        return read_npz(path)
    if path.suffix == SAFETENSORS:
        entries, metadata = read_safetensors(path)
    elif path.suffix in TORCH_SUFFIXES:
        entries, metadata = read_torch(path), {}
    else:
        known = ", ".join((".npz", SAFETENSORS, *TORCH_SUFFIXES))
        raise CheckpointError(
            f"{path}: weights are in files that end in {known}, or in a folder of transformers' or timm's"
        )
    if _TIMM & entries.keys():
        return Source(path, "timm", timm_hub.renamed(path, entries), metadata)
    if METADATA_KEY in metadata or _OURS & entries.keys():
        return Source(path, "safetensors", entries, metadata)
    if any(key.endswith(huggingface.LANDMARKS) for key in entries):
        return Source(path, "hf", huggingface.renamed(path, entries))
    raise CheckpointError(
        f"{path}: the names are neither ours nor timm's nor those of transformers' Vision Transformer; "
        f"there is none of {', '.join(sorted(_OURS | _TIMM))}; it has {listed(sorted(entries)) or 'no tensors'}"
    )
