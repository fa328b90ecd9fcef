"""BEiT: a frozen tokenizer's numbers of patches in blocks, against transformers; and folders that are not taken."""

import random

import numpy as np
import pytest
import torch
from messages import refusal
from models.weights.exported import edited
from safetensors.torch import load_file, save_file
from small_recipes import SMALL, keys, small_recipe
from torch.nn import functional as F
from transformers import BeitConfig, BeitForMaskedImageModeling, FlavaImageCodebook, FlavaImageCodebookConfig
from transformers.models.flava.image_processing_flava import FlavaMaskingGenerator

from vitscale.data.image_operations import to_model_input
from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.objectives import build_objective
from vitscale.objectives.masked_patches import blocks
from vitscale.objectives.tokenizer import load_tokenizer
from vitscale.recipe import override, smoke_form
from vitscale.training.beginning.initial_weights import check_same_teacher, check_teacher
from vitscale.training.beginning.tensors import step_tensors

P, SIDE, B, K = 8, 32, 3, 60
GRID = SIDE // P
MODEL = SMALL | {"mlp": "exact_gelu", "layer_scale": 0.1, "qkv_bias": "no_key", "norm_eps": 1e-12}
CODEBOOK = {"hidden_size": 8, "vocab_size": K, "num_blocks_per_group": 1}


@pytest.fixture(autouse=True)
def _allowed(monkeypatch):
    monkeypatch.setenv("VITSCALE_EXTENSIONS", "transformers")


@pytest.fixture
def folder(tmp_path):
    """A tokenizer with random weights, as transformers writes one; its numbers differ from patch to patch."""
    torch.manual_seed(0)
    tokenizer = FlavaImageCodebook(FlavaImageCodebookConfig(**CODEBOOK))
    with torch.no_grad():
        for parameter in tokenizer.parameters():
            parameter.normal_(0, 0.5)
    tokenizer.save_pretrained(tmp_path / "codebook")
    return tmp_path / "codebook"


def make_recipe(folder, *settings):
    targets = {"kind": "tokenizer", "path": "transformers:FlavaImageCodebook", "from": str(folder)}
    targets |= {"vocabulary": K, "image_size": 32}
    objective = {"kind": "masked_patches", "masks": "blocks", "share": 0.4, "targets": targets}
    return small_recipe(MODEL, *settings, batch=B, objective=objective)


def pictures(side=SIDE):
    """Smooth ones, whose patches a tokenizer tells apart."""
    small = torch.randint(256, (B, 3, 5, 5), generator=torch.Generator().manual_seed(1)).float()
    return F.interpolate(small, side, mode="bilinear").round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def normalised(images, dtype=torch.float32):
    return to_model_input(images, torch.device("cpu"), dtype)


def as_ours(theirs):
    """What maps transformers' tensors by name to ours: values as well as gradients."""
    found = {
        **{"mask": "beit.embeddings.mask_token", "cls": "beit.embeddings.cls_token"},
        **{"prediction.weight": "lm_head.weight", "prediction.bias": "lm_head.bias"},
        **{"norm.weight": "layernorm.weight", "norm.bias": "layernorm.bias"},
        **{"pos_embedding": "beit.embeddings.position_embeddings"},
        "embedding.bias": "beit.embeddings.patch_embeddings.projection.bias",
    }
    for i in range(2):
        ours, base = f"blocks.{i}", f"beit.layers.{i}"
        found |= {f"{ours}.layer_scale{n}": f"{base}.lambda_{n}" for n in (1, 2)}
        found |= {f"{ours}.attention.{p}_bias": f"{base}.attention.{p[0]}_proj.bias" for p in ("query", "value")}
        for layer, name in (
            *(("norm1", "layernorm_before"), ("norm2", "layernorm_after"), ("attention.out", "attention.o_proj")),
            *(("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2")),
        ):
            found |= {f"{ours}.{layer}.{kind}": f"{base}.{name}.{kind}" for kind in ("weight", "bias")}
    values = {name: theirs[key] for name, key in found.items()}
    for i in range(2):
        parts = [theirs[f"beit.layers.{i}.attention.{part}_proj.weight"] for part in "qkv"]
        values[f"blocks.{i}.attention.qkv.weight"] = torch.cat(parts)
    patches = theirs["beit.embeddings.patch_embeddings.projection.weight"]
    return values | {"embedding.weight": patches.permute(0, 2, 3, 1).flatten(1)}


def test_loss_and_gradients_are_transformers(folder):
    config = BeitConfig(
        **{"vocab_size": K, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"intermediate_size": 32, "patch_size": P, "image_size": SIDE, "use_mask_token": True},
        **{"use_absolute_position_embeddings": True, "drop_path_rate": 0.0},
    )
    theirs = BeitForMaskedImageModeling(config).train()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    recipe = make_recipe(folder)
    ours = build_objective(recipe, 0).train()
    values = as_ours(dict(theirs.named_parameters()))
    with torch.no_grad():
        for name, parameter in ours.named_weights():
            parameter.copy_(values.pop(name))
    assert not values
    tokenizer = load_tokenizer(recipe.objective.targets, GRID, torch.device("cpu"))
    ours.learn_from(tokenizer)
    images, plan = pictures(), ours.plan(keys(B), 0)
    masked = torch.zeros(B, GRID**2, dtype=torch.bool).scatter(1, plan[0][:, :6], True)
    pixels = images.permute(0, 3, 1, 2).float() / 255
    numbers = FlavaImageCodebook.from_pretrained(folder).get_codebook_indices(0.8 * pixels + 0.1).flatten(1)
    assert torch.equal(tokenizer(normalised(images, torch.bfloat16)), numbers) and len(numbers.unique()) > 4
    expected = theirs((pixels - 0.5) / 0.5, bool_masked_pos=masked, labels=numbers[masked])
    expected.loss.backward()
    losses = ours([normalised(images)[:, None]], torch.full((B,), -1), plan)
    losses.per_sample.mean().backward()
    assert losses.per_sample.mean().item() == pytest.approx(expected.loss.item(), rel=1e-6)
    is_right = (expected.logits.argmax(dim=2) == numbers)[masked].view(B, 6).float().mean(dim=1)
    torch.testing.assert_close(losses.shown["token_accuracy"], is_right)
    gradients = as_ours({name: parameter.grad for name, parameter in theirs.named_parameters()})
    for name, parameter in ours.named_weights():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in tokenizer.parameters())
    assert not any("tokenizer" in name or "network" in name for name, _ in ours.named_parameters())


def test_images_of_another_size_are_resized_and_one_number_is_one_patch(folder):
    recipe = make_recipe(folder, "model.patch_size=16", "data.image_size=64")
    tokenizer = load_tokenizer(recipe.objective.targets, 4, torch.device("cpu"))
    images = pictures(64)
    pixels = F.interpolate(images.permute(0, 3, 1, 2).float() / 255, (32, 32), mode="bicubic", antialias=True)
    expected = FlavaImageCodebook.from_pretrained(folder).get_codebook_indices(0.8 * pixels.clamp(0, 1) + 0.1)
    assert torch.equal(tokenizer(normalised(images)), expected.flatten(1))
    flipped = tokenizer(normalised(images.flip(1)))
    assert not torch.equal(flipped, expected.flatten(1))


def test_blocks_are_drawn_as_published():
    """The port of microsoft/unilm's generator in transformers, on 14 x 14 patches of which 75 are masked."""
    random.seed(0)
    generator = FlavaMaskingGenerator()
    theirs = np.stack([generator().bool().numpy() for _ in range(1500)])
    ours = blocks(keys(6000), 14, 75).reshape(-1, 14, 14)
    for figure in (
        lambda mask: mask.sum(axis=(1, 2)) == 75,
        lambda mask: mask.sum(axis=(1, 2)),
        lambda mask: (mask[:, 1:] & mask[:, :-1]).sum(axis=(1, 2)),
        lambda mask: (mask[:, :, 1:] & mask[:, :, :-1]).sum(axis=(1, 2)),
        lambda mask: mask[:, 0].sum(axis=1),
        lambda mask: mask[:, 7].sum(axis=1),
    ):
        their, our = figure(theirs).astype(float), figure(ours).astype(float)
        error = (their.var() / len(their) + our.var() / len(our)) ** 0.5
        assert abs(their.mean() - our.mean()) < 4 * error


@pytest.mark.parametrize("patches", [2, 3, 4, 7, 14, 32])
@pytest.mark.parametrize("share", [0.1, 0.3827, 1.0])
def test_counts_are_exact_and_each_sample_draws_alone(folder, patches, share):
    size = f"data.image_size={patches * P}"
    if patches == 2:
        share = max(share, 0.3)
    recipe = make_recipe(folder, size, f"objective.share={share}")
    assert recipe.objective.counts(recipe.context) == (round(patches**2 * share), 0, 0)
    objective = build_objective(recipe, 0)
    (order,) = objective.plan(keys(40), 0)
    assert torch.equal(order.sort(dim=1).values, torch.arange(patches**2).expand(40, -1))
    alone = torch.cat([objective.plan(keys(40)[at : at + 1], at)[0] for at in range(40)])
    assert torch.equal(alone, order)
    drawn = torch.from_numpy(blocks(keys(40), patches, objective.counts.corrupted))
    masked = torch.zeros_like(drawn).scatter(1, order[:, : objective.counts.corrupted], True)
    assert (masked | ~drawn).all() and (masked.sum(dim=1) == objective.counts.corrupted).all()


def test_the_recipe_of_before_is_unchanged_and_a_smoke_run_needs_no_tokenizer(folder, tmp_path):
    recipe = make_recipe(folder)
    without = override(recipe.dump(), ["objective.targets=null", "objective.masks=scattered"], "test").dump()
    assert {"targets", "masks"}.isdisjoint(without["objective"])
    small = smoke_form(recipe, tmp_path).objective
    assert (small.targets, small.masks, small.target) == (None, "blocks", "mean_colour")
    assert step_tensors(recipe, 0, 2).saved > 0  # planned without its package and its weights
    check_teacher(recipe, [])


def changed(folder, change):
    values = load_file(folder / "model.safetensors")
    change(values)
    save_file(values, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("error", "key", "settings"),
    [
        (RecipeError, "objective.targets.image_size", ["objective.targets.image_size=64"]),
        (RecipeError, "objective.targets.image_size", ["objective.targets.image_size=4"]),
        (RecipeError, "objective.targets.vocabulary", ["objective.targets.vocabulary=64"]),
        (CheckpointError, "objective.targets.from", ["objective.targets.from=/none/there"]),
        (RecipeError, "objective.targets.path", ["objective.targets.path=transformers:NoSuchCodebook"]),
        (RecipeError, "objective.targets.path", ["objective.targets.path=transformers:BeitConfig"]),
        (RecipeError, "VITSCALE_EXTENSIONS", ["objective.targets.path=os:system"]),
        (RecipeError, "objective.targets.path", ["objective.targets.path=transformers.FlavaImageCodebook"]),
        (RecipeError, "objective: targets", ["objective.target=pixels"]),
        (RecipeError, "objective.targets: from", ["objective.targets.from=s3://bucket/codebook"]),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused_by_its_key(folder, error, key, settings):
    with pytest.raises(error) as caught:
        check_teacher(make_recipe(folder, *settings), [])
    assert key in str(caught.value)


def test_folders_that_are_not_such_a_tokenizer_are_refused(folder, tmp_path):
    recipe, intact = make_recipe(folder), {file: file.read_bytes() for file in folder.iterdir()}
    for cause, spoil in (
        ("another hidden_size", lambda: edited(folder / "config.json", hidden_size=16)),
        ("a side that no machine has", lambda: edited(folder / "config.json", hidden_size=10**12)),
        ("blocks without end", lambda: edited(folder / "config.json", num_blocks_per_group=10**9)),
        ("more blocks than tensors", lambda: edited(folder / "config.json", num_blocks_per_group=200)),
        ("a list", lambda: edited(folder / "config.json", hidden_size=[8])),
        ("a tensor too few", lambda: changed(folder, lambda values: values.pop("blocks.input.bias"))),
        ("a tensor too many", lambda: changed(folder, lambda values: values.update(more=torch.zeros(2)))),
        ("an infinite weight", lambda: changed(folder, lambda values: values["blocks.input.bias"].fill_(torch.inf))),
        ("only a pickle", lambda: (folder / "model.safetensors").rename(folder / "pytorch_model.bin")),
        ("no config.json", lambda: (folder / "config.json").unlink()),
        ("a damaged config.json", lambda: (folder / "config.json").write_text("{")),
    ):
        spoil()
        with refusal(CheckpointError, "tokenizer", cause, {folder: "FOLDER"}):
            load_tokenizer(recipe.objective.targets, GRID, torch.device("cpu"))
        for file, content in intact.items():
            file.write_bytes(content)
    edited(
        folder / "config.json",
        auto_map={"AutoModel": "stranger--code"},
        attn_implementation="stranger/kernel",
        dtype="float64",
    )
    check_teacher(recipe, [])  # of another's config.json only the tokenizer's own keys count


def test_a_run_goes_on_with_the_tokenizer_that_it_began_with():
    one, other = ({"tokenizer": "a:B", "files": {"model.safetensors": digest}} for digest in ("12", "34"))
    check_same_teacher(one, dict(one))
    with pytest.raises(CheckpointError, match=r"objective\.targets\.from"):
        check_same_teacher(one, other)
