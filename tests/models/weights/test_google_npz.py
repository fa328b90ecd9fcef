"""Google's `.npz` in each of its namings, built here by hand; timm's reader of them is the judge."""

import numpy as np
import pytest
import torch
from models.small_models import images
from models.weights.exported import described
from models.weights.exported import loaded as read_back

from vitscale.ground.errors import CheckpointError
from vitscale.models.weights import describe, open_weights

D, HEADS, DEPTH, MLP, PATCH, GRID, CLASSES = 192, 3, 2, 768, 16, 4, 7
SIZE = PATCH * GRID
TI = {"name": "ViT-Ti/16", "depth": DEPTH}


def authors(class_token: bool = True, pre_logits: bool = False) -> dict[str, np.ndarray]:
    """A ViT-Ti/16 of two blocks with the names of the paper's authors, every value random."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding/kernel": (PATCH, PATCH, 3, D),
        "embedding/bias": (D,),
        "Transformer/posembed_input/pos_embedding": (1, GRID**2 + class_token, D),
        "Transformer/encoder_norm/scale": (D,),
        "Transformer/encoder_norm/bias": (D,),
        "head/kernel": (D, CLASSES),
        "head/bias": (CLASSES,),
    }
    if class_token:
        shapes["cls"] = (1, 1, D)
    if pre_logits:
        shapes |= {"pre_logits/kernel": (D, D), "pre_logits/bias": (D,)}
    for i in range(DEPTH):
        block = f"Transformer/encoderblock_{i}"
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            shapes |= {f"{block}/{norm}/scale": (D,), f"{block}/{norm}/bias": (D,)}
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for word in ("query", "key", "value"):
            shapes |= {f"{attention}/{word}/kernel": (D, HEADS, 64), f"{attention}/{word}/bias": (HEADS, 64)}
        shapes |= {f"{attention}/out/kernel": (HEADS, 64, D), f"{attention}/out/bias": (D,)}
        for layer, (inputs, outputs) in {"Dense_0": (D, MLP), "Dense_1": (MLP, D)}.items():
            dense = f"{block}/MlpBlock_3/{layer}"
            shapes |= {f"{dense}/kernel": (inputs, outputs), f"{dense}/bias": (outputs,)}
    random = np.random.default_rng(0)
    return {
        key: (random.normal(1.0 if key.endswith("scale") else 0.0, 0.08, shape)).astype(np.float32)
        for key, shape in shapes.items()
    }


def big_vision(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with the names of Big Vision."""
    renames = {"Attention_1": "Attention_0", "LayerNorm_2": "LayerNorm_1", "MlpBlock_3": "MlpBlock_0"}
    renames["Transformer/posembed_input/"] = ""
    result = {}
    for key, value in arrays.items():
        for old, new in renames.items():
            key = key.replace(old, new)
        result[key] = value
    return result


def stacked(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The layers of all blocks in one array."""
    mark = "Transformer/encoderblock_0/"
    result = {key: value for key, value in arrays.items() if "encoderblock_" not in key}
    for key in arrays:
        if key.startswith(mark):
            name = key.removeprefix(mark)
            layers = [arrays[f"Transformer/encoderblock_{i}/{name}"] for i in range(DEPTH)]
            result[f"Transformer/encoderblock/{name}"] = np.stack(layers)
    return result


def prefixed(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {prefix + key: value for key, value in arrays.items()}


def saved(path, arrays: dict[str, np.ndarray], compressed: bool = False):
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return path


def loaded(path, **block):
    notes: list[str] = []
    return read_back(described(TI | block, SIZE, CLASSES), path, notes), notes


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(images(SIZE)).logits


def timm_logits(path, pool: str) -> torch.Tensor:
    timm = pytest.importorskip("timm")
    options = {} if pool == "cls" else {"global_pool": "avg", "class_token": False, "fc_norm": False}
    peer = timm.create_model(
        "vit_tiny_patch16_224", img_size=SIZE, depth=DEPTH, num_classes=CLASSES, act_layer="gelu_tanh", **options
    ).eval()
    peer.load_pretrained(str(path))
    with torch.no_grad():
        return peer(images(SIZE).permute(0, 3, 1, 2))


# name -> (arrays, pooling); what stands beside the weights is the optimizer's, or the other tower of a pair.
GENERATIONS = {
    "authors": (authors(), "cls"),
    "with optimizer": (
        prefixed("opt/target/", authors()) | {"opt/state/step": np.array(5), "opt/state/cls/m": np.ones(3)},
        "cls",
    ),
    "big vision": (prefixed("params/", big_vision(authors(class_token=False))), "mean"),
    "big vision, stacked": (prefixed("params/", stacked(big_vision(authors(class_token=False)))), "mean"),
    "image tower": (
        prefixed("params/img/", big_vision(authors(class_token=False)))
        | {"params/txt/head/kernel": np.ones((2, 2), np.float32), "params/t": np.ones(1, np.float32)},
        "mean",
    ),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_naming_computes_timm_s_logits(generation, compressed, tmp_path):
    arrays, pool = GENERATIONS[generation]
    path = saved(tmp_path / "weights.npz", arrays, compressed)
    model, notes = loaded(path, pool=pool)
    expected = timm_logits(path, pool)
    assert expected.std() > 0.1
    assert (logits(model) - expected).abs().max() < 1e-4
    assert len(notes) == (generation in ("with optimizer", "image tower")), notes
    found = describe(open_weights(path), {"name": "ViT-Ti/16"})
    assert (found.num_classes, found.image_size, found.model.get("pool", "cls")) == (CLASSES, SIZE, pool)


def test_big_vision_s_class_token_has_no_position(tmp_path):
    """It adds positions before the class token comes, so that the same model has a row of zeros with the authors."""
    arrays = authors()
    key = "Transformer/posembed_input/pos_embedding"
    arrays[key][:, 0] = 0
    theirs = big_vision(arrays | {key: arrays[key][:, 1:]})
    expected, _ = loaded(saved(tmp_path / "authors.npz", arrays))
    found, _ = loaded(saved(tmp_path / "big_vision.npz", theirs))
    assert torch.equal(logits(found), logits(expected))
    assert (logits(found) - timm_logits(tmp_path / "authors.npz", "cls")).abs().max() < 1e-4


@pytest.mark.parametrize("stack", [False, True])
def test_bf16_arrays_are_void_to_numpy(stack, tmp_path):
    arrays = big_vision(authors(class_token=False))
    arrays = stacked(arrays) if stack else arrays
    bf16 = {key: torch.from_numpy(value).bfloat16() for key, value in arrays.items()}
    void = {key: value.view(torch.int16).numpy().view("V2") for key, value in bf16.items()}
    path = saved(tmp_path / "void.npz", prefixed("params/", void))
    with np.load(path) as file:
        assert file["params/head/kernel"].dtype == np.dtype("V2")
    found, _ = loaded(path, pool="mean")
    rounded = saved(tmp_path / "rounded.npz", {key: value.float().numpy() for key, value in bf16.items()})
    assert torch.equal(logits(found), logits(loaded(rounded, pool="mean")[0]))


@pytest.mark.parametrize("change", [np.float16, np.float64, ">f4", np.asfortranarray])
def test_other_floating_types_and_orders(change, tmp_path):
    arrays = {
        key: change(value) if callable(change) and not isinstance(change, type) else value.astype(change)
        for key, value in authors().items()
    }
    found, _ = loaded(saved(tmp_path / "other.npz", arrays))
    same = {key: np.ascontiguousarray(value, np.float32) for key, value in arrays.items()}
    assert torch.equal(logits(found), logits(loaded(saved(tmp_path / "same.npz", same))[0]))


def test_the_pretraining_head_is_kept(tmp_path):
    path = saved(tmp_path / "weights.npz", authors(pre_logits=True))
    assert describe(open_weights(path), {"name": "ViT-Ti/16"}).model["head"] == "pretrain"
    model, _ = loaded(path, head="pretrain")
    arrays = authors(pre_logits=True)
    with torch.no_grad():
        found = model(images(SIZE))
    hidden = np.tanh(found.tokens[:, 0].numpy() @ arrays["pre_logits/kernel"] + arrays["pre_logits/bias"])
    assert np.abs(hidden @ arrays["head/kernel"] + arrays["head/bias"] - found.logits.numpy()).max() < 1e-5


def test_a_zeroed_head_is_told(tmp_path):
    arrays = authors()
    arrays["head/kernel"][:] = 0
    _, notes = loaded(saved(tmp_path / "weights.npz", arrays))
    assert len(notes) == 1 and "every weight of the head is zero" in notes[0]


def test_group_norms_of_four_dimensions(tmp_path):
    """The stem of a released hybrid; timm's reader takes them as well."""
    timm = pytest.importorskip("timm")
    random = np.random.default_rng(1)
    arrays = authors()
    arrays["embedding/kernel"] = random.normal(0, 0.02, (8, 8, 64, D)).astype(np.float32)
    arrays["Transformer/posembed_input/pos_embedding"] = arrays["Transformer/posembed_input/pos_embedding"][:, :5]
    arrays["conv_root/kernel"] = random.normal(0, 1, (7, 7, 3, 64)).astype(np.float32)
    arrays["gn_root/scale"] = random.normal(1, 0.1, (1, 1, 1, 64)).astype(np.float32)
    arrays["gn_root/bias"] = random.normal(0, 0.1, (1, 1, 1, 64)).astype(np.float32)
    path = saved(tmp_path / "hybrid.npz", arrays)
    model, _ = loaded(path, name="R+ViT-Ti/16")
    peer = timm.create_model(
        "vit_tiny_r_s16_p8_224", img_size=SIZE, depth=DEPTH, num_classes=CLASSES, act_layer="gelu_tanh"
    ).eval()
    peer.load_pretrained(str(path))
    with torch.no_grad():
        expected = peer(images(SIZE).permute(0, 3, 1, 2))
    assert (logits(model) - expected).abs().max() < 1e-4


def test_pickled_objects_are_refused(tmp_path):
    arrays = authors() | {"extra": np.array([{"a": 1}], dtype=object)}
    with pytest.raises(CheckpointError, match=r"\bextra\b"):
        open_weights(saved(tmp_path / "weights.npz", arrays))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no zip", "other zip", "other arrays", "integers", "empty"])
@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_files(damage, compressed, tmp_path):
    import zipfile

    arrays = authors()
    if damage == "integers":
        arrays["embedding/bias"] = arrays["embedding/bias"].astype(np.int32)
    if damage == "other arrays":
        arrays = {"weights": np.ones(3), "biases": np.ones(3)}
    path = saved(tmp_path / "weights.npz", arrays, compressed)
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)
    elif damage == "no zip":
        path.write_bytes(b"no zip at all" * 100)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "other zip":
        path.unlink()
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data.pkl", b"x")
    with pytest.raises(CheckpointError, match=r"weights\.npz"):
        loaded(path)
