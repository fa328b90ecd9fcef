"""Nothing is skipped: every key that is missing, unexpected or of another shape is named; damage is a message."""

import json
import pickle

import pytest
import torch
from models.weights.exported import NAMES, SUFFIX, TINY, described, differing, loaded, valued, write, written
from safetensors.torch import load_file, save_file

from vitscale.ground.errors import CheckpointError, RecipeError, VitscaleError
from vitscale.models.weights import HEAD, describe, load_weights, open_weights, parameters, write_weights

# Each format's name of one parameter that every Transformer has.
NORM = {"safetensors": "norm.weight", "timm": "norm.weight", "hf": "vit.layernorm.weight"}
OUTPUT = {"safetensors": "head.weight", "timm": "head.weight", "hf": "classifier.weight"}
FORMATS = pytest.mark.parametrize("form", list(NORM))


def changed(form: str, folder, change) -> tuple:
    """A model, and the file of its weights after a change to its dictionary of tensors."""
    path, model, _ = written(folder, form)
    file = path / "model.safetensors" if form == "hf" else path
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return model, path


def refused(model, path, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, open_weights(path), **options)
    return str(caught.value)


@FORMATS
def test_all_that_differs_is_listed(form, tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[NORM[form]]
        tensors["surplus"] = torch.ones(3)
        tensors[OUTPUT[form]] = torch.ones(9, 48)
        tensors["another"] = torch.ones(2, 2)

    model, path = changed(form, tmp_path, change)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    message = refused(model, path)
    named = [f"{NORM[form]} (48,)", "surplus (3,)", "another (2, 2)", OUTPUT[form], "(9, 48)", "(7, 48)"]
    assert all(name in message for name in named), message
    assert "--drop-head" not in message, "it would not help"
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@FORMATS
def test_another_number_of_classes_is_refused_unless_the_head_is_dropped(form, tmp_path):
    path, model, _ = written(tmp_path, form)
    other = valued(described(TINY, num_classes=5), seed=1)
    before = other.head.weight.detach().clone()
    message = refused(other, path)
    assert "(7,)" in message and "(5,)" in message and "--drop-head" in message
    load_weights(other, open_weights(path), drop=HEAD)
    assert torch.equal(other.head.weight, before)
    assert differing(other, model) == ["head.weight", "head.bias"]


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_pre_logits_are_part_of_the_head(form, tmp_path):
    path, *_ = written(tmp_path, form, TINY | {"head": "pretrain"})
    linear = valued(described(TINY), seed=1)
    message = refused(linear, path)
    assert message.count(" pre_logits") == 2 and message.count("\n") == 3 and "--drop-head" in message
    load_weights(linear, open_weights(path), drop=HEAD)
    pretrain = described(TINY | {"head": "pretrain"}, num_classes=5).build()
    readers = parameters(pretrain, open_weights(path), drop=HEAD)
    of_head = {f"{layer}.{kind}" for layer in ("head", "pre_logits") for kind in ("weight", "bias")}
    assert pretrain.state_dict().keys() - readers.keys() == of_head
    no_head, *_ = written(tmp_path, form, drop_head=True, name=f"headless{SUFFIX[form]}")
    assert "bias" in refused(linear, no_head)
    load_weights(linear, open_weights(no_head), drop=HEAD)


@FORMATS
def test_a_piece_of_a_parameter_is_what_the_whole_has_there(form, tmp_path):
    path, model, _ = written(tmp_path, form, TINY | {"position": {"kind": "2d"}} if form == "safetensors" else TINY)
    readers = parameters(model, open_weights(path))
    in_pieces = {name for name, reader in readers.items() if reader.piece is not None}
    assert "norm.weight" in in_pieces
    assert (in_pieces == readers.keys()) == (form == "safetensors")
    for name in in_pieces:
        whole = readers[name]().flatten()
        for start, length in ((0, len(whole)), (0, 1), (len(whole) - 1, 1), (len(whole) // 3, len(whole) // 2)):
            assert torch.equal(readers[name].piece(start, length), whole[start : start + length]), (name, start, length)


def test_output_layer_and_pre_logits_can_be_dropped_apart(tmp_path):
    path, model, _ = written(tmp_path, "npz", TINY | {"head": "pretrain"})
    fewer = described(TINY | {"head": "pretrain"}, num_classes=5).build()
    readers = parameters(fewer, open_weights(path), drop=("head.weight", "head.bias"))
    assert torch.equal(readers["pre_logits.weight"](), model.pre_logits.weight)
    assert set(dict(fewer.named_parameters())) - set(readers) == {"head.weight", "head.bias"}


def test_positions_of_another_resolution_can_be_refused(tmp_path):
    source, large = open_weights(written(tmp_path, "safetensors", TINY, 40)[0]), described(TINY, 72)
    assert parameters(large.build(), source)["pos_embedding"].is_resampled
    with pytest.raises(CheckpointError, match=r"pos_embedding.*\(1, 26, 48\).*\(1, 82, 48\)"):
        parameters(large.build(), source, resample=False)


def test_a_file_without_a_head_knows_it(tmp_path):
    path, *_ = written(tmp_path, "safetensors", drop_head=True, class_names=NAMES)
    found = describe(open_weights(path))
    assert found.num_classes is None and found.class_names is None


SAID = {"version": 1, "model": {"name": "ViT-B/16"}, "image_size": 64, "num_classes": 1, "class_names": None}


@pytest.mark.parametrize(
    "said",
    [
        *("{", "[]", '{"version": 9}', '{"version": 1, "model": ' + '{"a": ' * 500 + "1" + "}" * 501, "[" * 100_000),
        *({"model": {}}, {"model": "ViT"}, {"model": {"name": "ViT-X"}}, {"image_size": "64"}, {"image_size": True}),
        *({"num_classes": "1"}, {"num_classes": True, "class_names": ["a"]}, {"num_classes": 10**19}),
        *({"class_names": ["a", "b"]}, {"class_names": "a"}, {"class_names": [None]}, {"image_size": 10**12}),
    ],
    ids=lambda said: str(said)[:50],
)
def test_a_damaged_description(said, tmp_path):
    said = said if isinstance(said, str) else json.dumps(SAID | said)
    save_file({"embedding.weight": torch.ones(2)}, tmp_path / "a.safetensors", {"vitscale": said})
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        describe(open_weights(tmp_path / "a.safetensors"))


@pytest.mark.parametrize(
    ("form", "position"),
    [
        *((form, {"kind": "1d"}) for form in ("safetensors", "npz", "timm", "hf")),
        *(("safetensors", {"kind": "2d"}), ("safetensors", {"kind": "2d", "at": "every_layer"})),
    ],
)
def test_positions_are_resampled_to_another_resolution_as_by_the_authors(form, position, tmp_path):
    """By scipy's zoom, as their code does it; nothing else changes."""
    zoom = pytest.importorskip("scipy.ndimage").zoom
    block = TINY | {"position": position}
    path, model, _ = written(tmp_path, form, block)
    notes: list[str] = []
    larger = loaded(described(block, 96), path, notes)
    theirs = dict(larger.named_parameters())
    for name, value in model.named_parameters():
        expected = value.detach()
        if "pos_embedding" in name and value.ndim == 3:  # (1, 1 + 8 * 8, D)
            grid = torch.from_numpy(zoom(expected[0, 1:].view(8, 8, 48).numpy(), (1.5, 1.5, 1), order=1))
            expected = torch.cat([expected[:, :1], grid.view(1, 144, 48)], dim=1)
        elif name.endswith(("pos_embedding.x", "pos_embedding.y")):
            expected = torch.from_numpy(zoom(expected.numpy(), (1.5, 1), order=1))
        is_same = expected.shape == value.shape
        torch.testing.assert_close(theirs[name], expected, rtol=0, atol=0 if is_same else 1e-5)
        assert is_same or any(f"{name} resampled from" in note for note in notes), notes
    resampled = sum(theirs[name].shape != value.shape for name, value in model.named_parameters())
    assert len(notes) == resampled > 0


def test_relative_positions_do_not(tmp_path):
    block = TINY | {"position": {"kind": "relative"}}
    path, *_ = written(tmp_path, "safetensors", block, 40)
    assert refused(valued(described(block, 72)), path).count("attention.relative") == 2


def test_a_grid_that_is_no_square_is_of_another_shape(tmp_path):
    model, path = changed("timm", tmp_path, lambda tensors: tensors.update(pos_embed=torch.ones(1, 1 + 48, 48)))
    message = refused(model, path)
    assert all(name in message for name in ("pos_embed", "(1, 49, 48)", "(1, 65, 48)")), message


def test_a_class_token_too_many(tmp_path):
    message = refused(valued(described(TINY | {"pool": "mean"})), written(tmp_path, "timm")[0])
    assert "cls_token" in message and "pos_embed" in message


def test_fp16_and_bf16_are_read_and_integers_are_not(tmp_path):
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {key: value.bfloat16() for key, value in tensors.items()}
        tensors["norm.weight"] = tensors["norm.weight"].half()

    model, path = changed("timm", tmp_path, halve)
    expected = {name: parameter.bfloat16().float() for name, parameter in model.named_parameters()}
    load_weights(model, open_weights(path))
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())
    path.unlink()
    model, path = changed("timm", tmp_path, lambda tensors: tensors.update({"norm.bias": torch.ones(48).int()}))
    message = refused(model, path)
    assert "norm.bias" in message and "torch.int32" in message


def test_a_model_in_bf16_is_given_its_dtype(tmp_path):
    path, model, description = written(tmp_path, "npz")
    again = description.build().to_empty(device="cpu").bfloat16()
    load_weights(again, open_weights(path))
    assert differing(model.bfloat16(), again) == [] and again.norm.weight.dtype == torch.bfloat16


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


# What is no weights: a file's name and content, and what the message has to name beside the file.
NO_WEIGHTS = {
    "nothing": ("a.safetensors", b"", ["safetensors"]),
    "zeros": ("a.safetensors", b"\x10" + bytes(30), ["safetensors"]),
    "a short text": ("a.pth", b"nothing of torch's", []),
    "a long text": ("a.pth", b"hello" * 100, []),
    "a pickle that runs code": ("a.pth", pickle.dumps({"model": Evil()}, protocol=2), ["print"]),
    "the beginning of a zip": ("a.npz", b"PK\x03\x04", [".npz"]),
    "HDF5": ("a.h5", b"\x89HDF", [".safetensors", ".npz"]),
    "one tensor": ("a.pt", torch.ones(3), ["Tensor"]),
    "a number": ("a.bin", {"a": torch.ones(2), "epoch": 3}, ["epoch"]),
    "another library's names": ("a.pt", {"conv1": torch.ones(2)}, ["timm", "conv1"]),
}


def no_weights(cause: str, folder) -> str:
    name, content, _ = NO_WEIGHTS[cause]
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError) as caught:
        open_weights(path)
    return str(caught.value)


@pytest.mark.parametrize("cause", NO_WEIGHTS)
def test_what_is_no_weights(cause, tmp_path, capfd):
    name, _, named = NO_WEIGHTS[cause]
    message = no_weights(cause, tmp_path)
    assert all(word in message for word in [str(tmp_path / name), *named]) and "weights_only" not in message, message
    assert "executed" not in capfd.readouterr().out


@pytest.mark.parametrize("form", ["safetensors", "timm", "hf"])
def test_truncated_files(form, tmp_path):
    path, *_ = written(tmp_path, form)
    file = path / "model.safetensors" if form == "hf" else path
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=file.name):
        open_weights(path)


def test_folders_that_are_none_of_ours(tmp_path):
    (tmp_path / "readme.md").write_text("nothing")
    with pytest.raises(CheckpointError, match=r"config\.json.*recipe\.yaml.*readme\.md"):
        open_weights(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "convnext"}')
    with pytest.raises(CheckpointError, match="'convnext'"):
        open_weights(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_weights(tmp_path)


def test_a_wrong_or_missing_name(tmp_path):
    source = open_weights(written(tmp_path, "npz", {"name": "ViT-Ti/16"})[0])
    with pytest.raises(RecipeError, match="--model"):
        describe(source)
    with pytest.raises(RecipeError, match="'ViT-Ti"):
        describe(source, {"name": "ViT-Ty/16"})
    for other in ("ViT-S/16", "ViT-Ti/32", "ViT-L/16", "R+ViT-Ti/16", "ResNet50x1"):
        with pytest.raises(CheckpointError):
            load_weights(describe(source, {"name": other}).build(), source)
    with pytest.raises(RecipeError, match="axial"):
        load_weights(describe(source, {"name": "Axial-ViT-B/16"}).build(), source)


@pytest.mark.parametrize("form", ["safetensors", "npz", "timm", "hf"])
def test_nothing_is_overwritten_and_a_failure_leaves_nothing(form, tmp_path):
    path, model, description = written(tmp_path, form)
    with pytest.raises(RecipeError, match=path.name):
        write(model, description, form, tmp_path)
    if form in ("safetensors", "npz"):
        with pytest.raises(RecipeError, match=rf"\{path.suffix}"):
            write_weights(tmp_path / "weights", form, description, dict(model.named_parameters()).__getitem__)

    def breaks(name: str) -> torch.Tensor:
        if name == "norm.bias":
            raise CheckpointError("broken off")
        return model.get_parameter(name).detach()

    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(VitscaleError, match="broken off"):
        write_weights(empty / path.name, form, description, breaks)
    assert list(empty.iterdir()) == []
    if form == "hf":
        write_weights(empty, form, description, lambda name: model.get_parameter(name).detach())
        assert (empty / "config.json").is_file()
