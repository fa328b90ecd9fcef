"""Masked autoencoders against transformers' ViTMAE, in both directions, and what a recipe may say of them."""

import re

import pytest
import torch
from objectives.updates import update
from safetensors.torch import load_file, save_file
from small_recipes import SMALL, keys, small_recipe, with_random_values
from timm.models.vision_transformer import VisionTransformer
from transformers import ViTMAEConfig, ViTMAEForPreTraining
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

from vitscale.data.image_operations import to_model_input
from vitscale.ground.errors import CheckpointError
from vitscale.models import initial_value
from vitscale.models.weights import load_weights, open_weights, parameters_beside
from vitscale.models.weights.foreign import table
from vitscale.models.weights.huggingface import file_name
from vitscale.objectives import build_objective
from vitscale.objectives.mae import exact_pixels, tells_levels_apart
from vitscale.recipe import Muon, Normalise
from vitscale.training.optimizers.parameter_groups import LR_FACTOR, parameter_groups

P, SIDE, B = 8, 32, 3
N = (SIDE // P) ** 2
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
MODEL = SMALL | {"mlp": "exact_gelu"}
DECODER = {"decoder_width": 16, "decoder_depth": 3, "decoder_heads": 4}
FIXED = {"kind": "sincos", "table": "mae"}


def make_recipe(*settings, objective=None, **model):
    blocks = {"objective": {"kind": "mae", **DECODER, **(objective or {})}, "data": {"normalise": IMAGENET}}
    return small_recipe(MODEL | {"position": FIXED} | model, *settings, batch=B, **blocks)


def made(*settings, **blocks):
    """An objective with random values, none of them zero."""
    return with_random_values(build_objective(make_recipe(*settings, **blocks), 0)).train()


def pictures():
    return torch.randint(256, (B, SIDE, SIDE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def normalised(images, dtype=torch.float32):
    return to_model_input(images, torch.device("cpu"), dtype, make_recipe().data.normalise)


def peer(norm_pix=True, removed=0.75):
    """transformers' model of the same dimensions, with values of its own."""
    config = ViTMAEConfig(
        **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
        **{"patch_size": P, "image_size": SIDE, "hidden_act": "gelu", "layer_norm_eps": 1e-6},
        **{"decoder_hidden_size": 16, "decoder_num_hidden_layers": 3, "decoder_num_attention_heads": 4},
        **{"decoder_intermediate_size": 64, "mask_ratio": removed, "norm_pix_loss": norm_pix},
    )
    torch.manual_seed(0)
    theirs = ViTMAEForPreTraining(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:  # positions are fixed
                parameter.normal_(0, 0.3) if parameter.ndim > 1 or "bias" in name else parameter.uniform_(0.5, 1.5)
            else:  # which a new model has as zeros in transformers 5.23, and published files as its function has them
                by_row, by_column = build_2d_sinusoidal_position_embedding(
                    SIDE // P, SIDE // P, parameter.shape[2], cls_token=True
                ).chunk(2, dim=1)
                parameter.copy_(torch.cat([by_column, by_row], dim=1)[None])
    return theirs.train()


def computed(theirs, images, plan):
    """What transformers' model computes where it draws our plan."""
    noise = torch.cat(plan, dim=1).argsort(dim=1).float() / N  # the rank of a patch in our order
    return theirs(pixel_values=images.permute(0, 3, 1, 2), noise=noise)


def take(objective, path):
    """Give an objective the whole of the weights at a path."""
    source = open_weights(path)
    load_weights(objective.backbone, source, report=lambda note: None)
    readers = parameters_beside(objective, objective.rules(source.form), source)
    with torch.no_grad():
        for name, parameter in objective.named_parameters():
            if not name.startswith("backbone."):
                parameter.copy_(readers.pop(name)())
    assert not readers
    return objective


# ---- Against transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm_pix", "removed"), [(True, 0.75), (False, 0.75), (True, 0.5)])
def test_loss_and_gradients_are_transformers(norm_pix, removed, tmp_path):
    theirs = peer(norm_pix, removed)
    theirs.save_pretrained(tmp_path)
    ours = take(made(objective={"norm_pix": norm_pix, "removed": removed}), tmp_path)
    images, plan = normalised(pictures()), ours.plan(keys(B), 0)
    expected = computed(theirs, images, plan)
    assert torch.equal(expected.mask.sum(dim=1), torch.full((B,), float(plan[1].shape[1])))
    found = ours(images, torch.full((B,), -1), plan).per_sample
    assert found.shape == (B,) and found.mean().item() == pytest.approx(expected.loss.item(), rel=1e-6)
    found.mean().backward()
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_weights()}
    of_theirs = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    for rule in rules(ours, "hf"):
        names = [name for each in rule.theirs for name in of_theirs if file_name(name) == each]
        assert len(names) == len(rule.theirs) - rule.compares, rule.theirs
        for name, gradient in zip(names, rule.split(gradients.pop(rule.ours)), strict=False):
            largest = of_theirs[name].abs().max()
            assert (gradient - of_theirs.pop(name)).abs().max() < 2e-6 * max(largest, 1), name
    assert not gradients and not of_theirs


def rules(objective, form):
    """A rule for each parameter of an objective."""
    names = {name for name, _ in objective.named_weights()}
    found = [rule for rule in (*table(objective.backbone, form), *objective.rules(form)) if rule.ours in names]
    assert {rule.ours for rule in found} == names and len(found) == len(names)
    return found


def there(objective, form):
    """All values of an objective by the names of a format."""
    values = {name: parameter.detach() for name, parameter in objective.named_weights()}
    return {
        key: part.contiguous()
        for rule in rules(objective, form)
        for key, part in zip(rule.theirs, rule.split(values[rule.ours]), strict=True)
    }


@pytest.mark.parametrize("names", ["of 4", "of 5"])
def test_our_weights_compute_the_same_in_transformers(names, tmp_path):
    """As files of version 4 have them, or under the names in which version 5 writes the decoder's blocks."""
    peer().save_pretrained(tmp_path)
    ours = made()
    tensors = there(ours, "hf")
    if names == "of 5":
        of_4, of_5 = "decoder.decoder_layers", "decoder.decoder_encoder.layer"
        tensors = {key.replace(of_4, of_5): value for key, value in tensors.items()}
        assert tensors.keys() == load_file(tmp_path / "model.safetensors").keys()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    again = take(build_objective(make_recipe(), 0), tmp_path)
    assert all(map(torch.equal, again.parameters(), ours.parameters()))
    if names == "of 4":
        images, plan = normalised(pictures()), ours.plan(keys(B), 0)
        expected = computed(ViTMAEForPreTraining.from_pretrained(tmp_path), images, plan).loss.item()
        assert ours(images, torch.full((B,), -1), plan).per_sample.mean().item() == pytest.approx(expected, rel=1e-5)


# ---- In the names of MAE's authors -----------------------------------------------------------------------------------


def test_a_whole_file_of_the_authors_is_read_and_its_encoder_is_timm_s(tmp_path):
    ours = made()
    tensors = there(ours, "timm")
    of_block = [f"{layer}.{kind}" for layer in AUTHORS for kind in ("weight", "bias")]
    of_decoder = {f"decoder_blocks.{i}.{each}" for i in range(3) for each in of_block}
    of_decoder |= {"mask_token", "decoder_pos_embed"} | {
        f"decoder_{layer}.{kind}" for layer in ("embed", "norm", "pred") for kind in ("weight", "bias")
    }
    assert {key for key in tensors if key.startswith(("decoder", "mask"))} == of_decoder  # of models_mae.py
    torch.save({"model": tensors}, tmp_path / "mae_full.pth")
    again = take(build_objective(make_recipe(), 0), tmp_path / "mae_full.pth")
    assert all(map(torch.equal, again.parameters(), ours.parameters()))
    encoder = VisionTransformer(
        img_size=SIDE, patch_size=P, embed_dim=24, depth=2, num_heads=2, mlp_ratio=32 / 24, num_classes=0
    )
    encoder.load_state_dict({key: value for key, value in tensors.items() if key not in of_decoder})
    images = normalised(pictures())
    with torch.no_grad():
        expected = encoder.eval().forward_features(images.permute(0, 3, 1, 2))
        torch.testing.assert_close(ours.eval()(images).tokens, expected, rtol=1e-4, atol=1e-5)


AUTHORS = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")


@pytest.mark.parametrize("key", ["pos_embed", "decoder_pos_embed"])
def test_other_positions_than_the_fixed_ones_are_refused(key, tmp_path):
    tensors = there(made(), "timm")
    tensors[key] = tensors[key] + 0.01
    save_file(tensors, tmp_path / "mae.safetensors")
    with pytest.raises(CheckpointError, match=key):
        take(build_objective(make_recipe(), 0), tmp_path / "mae.safetensors")


def test_another_decoder_is_refused(tmp_path):
    save_file(there(made(), "timm"), tmp_path / "mae.safetensors")
    other = build_objective(make_recipe(objective={"decoder_depth": 2}), 0)
    with pytest.raises(CheckpointError, match=r"decoder_blocks\.2\.norm1\.weight"):
        take(other, tmp_path / "mae.safetensors")


# ---- What is drawn and computed --------------------------------------------------------------------------------------


MASKED = {"kind": "masked_patches"}


@pytest.mark.parametrize(
    ("model", "objective"),
    [
        *(({}, {}), ({"pool": "mean"}, {}), ({"pool": "normed_mean"}, {})),
        *(({"registers": 2, "position": {"kind": "rope"}}, {}), ({"pool": "cls", "position": {"kind": "1d"}}, MASKED)),
    ],
)
def test_every_parameter_learns_and_labels_play_no_part(model, objective):
    recipe = small_recipe(MODEL | {"position": FIXED} | model, objective=objective or {"kind": "mae", **DECODER})
    objective, images = with_random_values(build_objective(recipe, 0)).train(), [normalised(pictures())[:, None]]
    one, other = (update(recipe, objective, images, labels)[0] for labels in (torch.full((B,), -1), torch.arange(B)))
    assert torch.equal(one.per_sample, other.per_sample)
    assert [name for name, p in objective.named_weights() if p.grad is None or p.grad.abs().max() == 0] == []


def test_recomputed_blocks_give_the_same_gradients():
    images = normalised(pictures())
    gradients = []
    for every in (0, 1):
        objective = made(f"parallelism.activation_checkpointing={every}")
        objective([images[:, None]], torch.full((B,), -1), objective.plan(keys(B), 0)).per_sample.sum().backward()
        gradients.append([parameter.grad for parameter in objective.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_new_decoder_begins_as_its_authors():
    objective = build_objective(make_recipe(objective={"decoder_width": 64}), 0)
    initial = {name: initial_value(objective, name, p.shape, 0) for name, p in objective.named_weights()}
    assert initial["mask"].std().item() == pytest.approx(0.02, rel=0.4)
    for name, value in initial.items():
        if name.startswith("decoder.") and value.ndim == 2:
            rows, columns = (64, 64) if "qkv" in name else value.shape
            bound = (6 / (rows + columns)) ** 0.5
            assert 0.9 * bound < value.abs().max() <= bound, name
        elif name.startswith("decoder."):
            assert value.unique().tolist() == [1.0 if "norm" in name and name.endswith("weight") else 0.0], name


# ---- What is known of its parameters ---------------------------------------------------------------------------------


def test_the_decoder_is_neither_the_models_blocks_nor_its_head():
    recipe = make_recipe("optimizer.layer_decay=0.5", "optimizer.lr=1.0")
    objective = build_objective(recipe, 0)
    factors = {p: group[LR_FACTOR] for group in parameter_groups(recipe, objective) for p in group["params"]}
    for name, parameter in objective.named_weights():
        block = re.match(r"blocks\.(\d)\.", name)
        above = 2 - int(block[1]) if block else 3 if name.startswith(("embedding", "cls")) else 0
        assert factors[parameter] == 0.5**above, name
    assert [*objective.units()] == [*objective.backbone.blocks, *objective.decoder.blocks]
    for name in ("decoder.blocks.2.mlp.fc1.weight", "blocks.1.mlp.fc1.weight"):
        assert Muon(name="muon", lr=1.0).kept(name, (64, 16)).keys() == {"momentum_buffer"}
    assert Muon(name="muon", lr=1.0).kept("decoder.prediction.weight", (192, 16)).keys() == {"exp_avg", "exp_avg_sq"}


def test_adafactor_sees_the_heads_of_the_decoder():
    recipe = make_recipe("optimizer={name: adafactor, lr: 1.0}")
    assert recipe.axes("decoder.blocks.0.attention.qkv.weight", (48, 16)) == (3, 4, 4, 16)
    assert recipe.axes("decoder.blocks.0.attention.out.weight", (16, 16)) == (16, 4, 4)
    assert recipe.axes("blocks.0.attention.qkv.weight", (72, 24)) == (3, 2, 12, 24)


@pytest.mark.parametrize(
    ("normalise", "are_told"),
    [
        ({}, True),
        ({"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}, True),
        ({"mean": [0.0] * 3, "std": [1.0] * 3}, True),
        ({"mean": [0.0] * 3, "std": [0.1] * 3}, False),
        ({"mean": [0.1307] * 3, "std": [0.3081] * 3}, False),
    ],
)
def test_pixels_are_told_only_where_no_level_is_lost(normalise, are_told):
    """Of all 256 levels in bf16; else targets are the pixels as the model gets them."""
    settings = Normalise(**normalise)
    levels = torch.arange(256.0)[:, None].expand(-1, 3) / 255
    exact = (levels - torch.tensor(settings.mean)) / torch.tensor(settings.std)
    found = exact_pixels(exact.bfloat16().flatten(), settings).view(256, 3)
    wrong = int(((found - exact).abs() > 1e-4).sum())
    assert tells_levels_apart(settings) is are_told and (wrong == 0) is are_told


def test_operations_on_floats_are_part_of_the_target():
    for operation, is_known in (("{kind: random_erasing, mode: mean}", False), ("{kind: gray}", True)):
        objective = build_objective(make_recipe(f"data.operations=[{operation}]"), 0)
        assert (objective.normalise is not None) is is_known
