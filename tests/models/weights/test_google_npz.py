"""Google's `.npz` in each of its namings, built here by hand; timm's reader of them is the judge."""

import zipfile

import numpy as np
import pytest
import torch
from messages import refusal
from models.small_models import images
from models.weights.exported import TINY, described, differing, written
from models.weights.exported import loaded as read_back

from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.models.weights import describe, open_weights
from vitscale.models.weights.foreign import table, their_shapes

D, HEADS, DEPTH, MLP, PATCH, GRID, CLASSES = 192, 3, 2, 768, 16, 4, 7
SIZE = PATCH * GRID
TI = {"name": "ViT-Ti/16", "depth": DEPTH}
POSITIONS = "Transformer/posembed_input/pos_embedding"
FIXED = {"pool": "map", "position": {"kind": "sincos"}}
# Ours -> timm's arguments.
POOLS = {
    "cls": {},
    "mean": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "map": {"global_pool": "map", "class_token": False},
}


def shapes_of(
    width: int, depth: int, mlp_dim: int, heads: int, num_classes: int, pool: str, pre_logits: bool = False
) -> dict[str, tuple[int, ...]]:
    """Of every array but positions, by the names of the paper's authors; a pooling by attention is big_vision's."""
    D, by_head, hidden = (width,), (heads, width // heads), (mlp_dim,)
    dense = [("embedding", (PATCH, PATCH, 3), D), ("head", D, (num_classes,)), *[("pre_logits", D, D)] * pre_logits]
    norms = ["Transformer/encoder_norm"]
    blocks = [(f"Transformer/encoderblock_{i}", 1, 3, (0, 2)) for i in range(depth)]
    for block, attention, mlp, of_block in [*blocks, *[("MAPHead_0", 0, 0, (0,))] * (pool == "map")]:
        parts = f"{block}/MultiHeadDotProductAttention_{attention}"
        dense += [(f"{parts}/{part}", D, by_head) for part in ("query", "key", "value")]
        dense += [(f"{parts}/out", by_head, D)]
        dense += [(f"{block}/MlpBlock_{mlp}/Dense_0", D, hidden), (f"{block}/MlpBlock_{mlp}/Dense_1", hidden, D)]
        norms += [f"{block}/LayerNorm_{i}" for i in of_block]
    tokens = {"cls": {"cls": (1, 1, width)}, "map": {"MAPHead_0/probe": (1, 1, width)}}
    return {
        **{f"{name}/kernel": inputs + outputs for name, inputs, outputs in dense},
        **{f"{name}/bias": outputs for name, _, outputs in dense},
        **{f"{name}/{kind}": D for name in norms for kind in ("scale", "bias")},
        **tokens.get(pool, {}),
    }


def authors(pool: str = "cls", pre_logits: bool = False) -> dict[str, np.ndarray]:
    """A ViT-Ti/16 of two blocks with the names of the paper's authors, every value random."""
    shapes = shapes_of(D, DEPTH, MLP, HEADS, CLASSES, pool, pre_logits) | {POSITIONS: (1, GRID**2 + (pool == "cls"), D)}
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


def timm_logits(path, pool: str = "cls", name: str = "vit_tiny_patch16_224") -> torch.Tensor:
    sizes = {"img_size": SIZE, "depth": DEPTH, "num_classes": CLASSES, "act_layer": "gelu_tanh"}
    peer = pytest.importorskip("timm").create_model(name, **sizes, **POOLS[pool]).eval()
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
    "big vision, map": (prefixed("params/", big_vision(authors("map"))), "map"),
    "big vision": (prefixed("params/", big_vision(authors("mean"))), "mean"),
    "big vision, stacked": (prefixed("params/", stacked(big_vision(authors("mean")))), "mean"),
    "image tower": (
        prefixed("params/img/", big_vision(authors("mean")))
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
    found = describe(open_weights(path), {"name": "ViT-Ti/16"} | ({"pool": "map"} if pool == "map" else {}))
    assert (found.num_classes, found.image_size, found.model.get("pool", "cls")) == (CLASSES, SIZE, pool)


def test_big_vision_s_class_token_has_no_position(tmp_path):
    """It adds positions before the class token comes, so that the same model has a row of zeros with the authors."""
    arrays = authors()
    arrays[POSITIONS][:, 0] = 0
    theirs = big_vision(arrays | {POSITIONS: arrays[POSITIONS][:, 1:]})
    expected, _ = loaded(saved(tmp_path / "authors.npz", arrays))
    found, _ = loaded(saved(tmp_path / "big_vision.npz", theirs))
    assert torch.equal(logits(found), logits(expected))
    assert (logits(found) - timm_logits(tmp_path / "authors.npz")).abs().max() < 1e-4


# big_vision's variants: width, depth, mlp, heads.
VARIANTS = {"Ti": (192, 12, 768, 3), "S": (384, 12, 1536, 6), "B": (768, 12, 3072, 12), "L": (1024, 24, 4096, 16)}


@pytest.mark.parametrize("size", VARIANTS)
def test_the_arrays_of_a_variant_with_fixed_positions(size):
    model = described({"name": f"ViT-{size}/16", **FIXED}, 224, 1000).build()
    assert their_shapes(model, table(model, "npz")) == shapes_of(*VARIANTS[size], 1000, "map")


def test_fixed_positions_are_no_array(tmp_path):
    path, model, _ = written(tmp_path, "npz", TINY | FIXED)
    with np.load(path) as file:
        arrays = big_vision(dict(file))
    assert [key for key in arrays if "pos" in key] == []
    theirs = saved(tmp_path / "theirs.npz", arrays)
    for image_size in (64, 96):  # positions are those of the grid
        assert differing(model, read_back(described(TINY | FIXED, image_size), theirs)) == []
    with pytest.raises(CheckpointError, match=POSITIONS):
        read_back(described(TINY | {"pool": "map"}), theirs)
    with refusal(RecipeError, "weights", "fixed positions of MAE as npz"):
        written(tmp_path, "npz", TINY | {"position": {"kind": "sincos", "table": "mae"}})


@pytest.mark.parametrize("stack", [False, True])
def test_bf16_arrays_are_void_to_numpy(stack, tmp_path):
    arrays = big_vision(authors("mean"))
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
    hidden = found.tokens[:, 0].numpy() @ arrays["pre_logits/kernel"] + arrays["pre_logits/bias"]
    assert np.abs(hidden - found.pooled.numpy()).max() < 1e-5
    expected = np.tanh(hidden) @ arrays["head/kernel"] + arrays["head/bias"]
    assert np.abs(expected - found.logits.numpy()).max() < 1e-5


def test_a_zeroed_head_is_told(tmp_path):
    arrays = authors()
    arrays["head/kernel"][:] = 0
    _, notes = loaded(saved(tmp_path / "weights.npz", arrays))
    assert len(notes) == 1 and "every weight of the head is zero" in notes[0]


def test_group_norms_of_four_dimensions(tmp_path):
    """The stem of a released hybrid; timm's reader takes them as well."""
    random = np.random.default_rng(1)
    arrays = authors()
    arrays["embedding/kernel"] = random.normal(0, 0.02, (8, 8, 64, D)).astype(np.float32)
    arrays[POSITIONS] = arrays[POSITIONS][:, :5]
    arrays["conv_root/kernel"] = random.normal(0, 1, (7, 7, 3, 64)).astype(np.float32)
    arrays["gn_root/scale"] = random.normal(1, 0.1, (1, 1, 1, 64)).astype(np.float32)
    arrays["gn_root/bias"] = random.normal(0, 0.1, (1, 1, 1, 64)).astype(np.float32)
    path = saved(tmp_path / "hybrid.npz", arrays)
    model, _ = loaded(path, name="R+ViT-Ti/16")
    assert (logits(model) - timm_logits(path, name="vit_tiny_r_s16_p8_224")).abs().max() < 1e-4


def test_pickled_objects_are_refused(tmp_path):
    arrays = authors() | {"extra": np.array([{"a": 1}], dtype=object)}
    with pytest.raises(CheckpointError, match=r"\bextra\b"):
        open_weights(saved(tmp_path / "weights.npz", arrays))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no zip", "other zip", "other arrays", "integers", "empty"])
@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_files(damage, compressed, tmp_path):
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
