"""LAMB, Adafactor and Muon, whose updates need whole tensors: against timm's, on every world and ZeRO stage; resumed,
and moved to others; their recipes, checkpoints and memory.
"""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from known_gradients import TENSOR_RATE, TENSOR_UPDATES, TENSORS, LinearLoss, update_tensors
from outcomes import assert_same_run, checkpoint, column, everything, put_together
from rank_faults import save_at_once
from ranks import STEPS, asked, job, launch, make_recipe, on_ranks, quick_of

from vitscale.ground.errors import RecipeError
from vitscale.models import build_model
from vitscale.models.weights.foreign import table
from vitscale.objectives import build_objective
from vitscale.recipe import Muon, differences, load_recipe, validate_recipe
from vitscale.training.beginning.memory import expected_memory
from vitscale.training.deepspeed.fragments import checkpoint_bytes
from vitscale.training.optimizers import muon
from vitscale.training.optimizers.muon import orthogonal
from vitscale.training.optimizers.parameter_groups import parameter_groups
from vitscale.training.optimizers.rule import Update, rule_of

OPTIMIZERS = {
    "lamb": {"name": "lamb", "lr": 1.0, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1},
    "adafactor": {"name": "adafactor", "lr": 1.0, "factored_from": 16, "weight_decay": 0.1},
    "muon": {"name": "muon", "lr": 1.0, "weight_decay": 0.1},
}
GROUPED = {
    "decay_exclude": "bias$",
    "layer_decay": 0.5,
    "groups": [{"match": r"norm\.bias", "frozen": True}, {"match": "^head", "lr_factor": 10.0, "weight_decay": 0.3}],
}
# By the text above, by hand: (factor of the learning rate, weight decay).
HOW = {
    **{"embedding.weight": (0.125, 0.1), "embedding.bias": (0.125, 0.0), "blocks.0.attention.qkv.weight": (0.25, 0.1)},
    **{"blocks.0.attention.qkv.bias": (0.25, 0.0), "blocks.0.attention.out.weight": (0.25, 0.1)},
    **{"blocks.1.fc.weight": (0.5, 0.1), "blocks.1.conv.weight": (0.5, 0.1), "blocks.1.norm.weight": (0.5, 0.1)},
    **{"head.weight": (10.0, 0.3), "head.bias": (10.0, 0.3)},
}
FROZEN = "blocks.1.norm.bias"
MATRICES = {
    *("blocks.0.attention.qkv.weight", "blocks.0.attention.out.weight", "blocks.1.fc.weight", "blocks.1.conv.weight")
}
WORLDS = quick_of((1, 2, 4), [2])
# Other wrappers of DeepSpeed's, and one of several calls of the optimizer for a group's parameters.
VARIANTS = {("bf16", 1): ["", "-accumulated"], ("bf16", 3): ["", "-sub-groups"]}
CASES = {
    f"{name}-{precision}-zero{stage}{variant}": (name, precision, stage, variant)
    for name in OPTIMIZERS
    for precision in ("fp32", "bf16")
    for stage in range(4)
    for variant in VARIANTS.get((precision, stage), [""])
} | {f"adafactor-fp32-zero{stage}-as-stored": ("adafactor", "fp32", stage, "-as-stored") for stage in (0, 1, 3)}


def content(case: str, world: int) -> dict[str, Any]:
    name, precision, stage, variant = CASES[case]
    return {
        "precision": precision,
        "model": {"depth": 2},
        "batch": {"global": world * (2 if variant == "-accumulated" else 1), "micro_max": 1},
        "optimizer": {**OPTIMIZERS[name], **GROUPED, **({"by_head": False} if variant == "-as-stored" else {})},
        "parallelism": {"zero_stage": stage},
        "deepspeed": {"zero_optimization": {"sub_group_size": 400}} if variant == "-sub-groups" else {},
    }


# big_vision's tensors that are not ours transposed: how many ours stacks, the axes of each in ours, in theirs' order.
HEADS, WIDTH, PATCH = 2, 32, 8
BIG_VISIONS = {
    "embedding.weight": (1, (WIDTH, PATCH, PATCH, 3), (1, 2, 3, 0)),  # (P, P, C, D)
    "blocks.0.attention.qkv.weight": (3, (HEADS, WIDTH // HEADS, WIDTH), (2, 0, 1)),  # (D, H, d)
    "blocks.0.attention.out.weight": (1, (WIDTH, HEADS, WIDTH // HEADS), (1, 2, 0)),  # (H, d, D)
}


def theirs(each: str, ours: np.ndarray, big_visions: bool) -> list[torch.Tensor]:
    """The tensors that one of ours is with big_vision, or itself."""
    if not big_visions or each not in BIG_VISIONS:
        return [torch.from_numpy(ours)]
    count, axes, order = BIG_VISIONS[each]
    return [torch.from_numpy(part.reshape(axes).transpose(order).copy()) for part in np.split(ours, count)]


def ours(each: str, values: list[torch.Tensor], big_visions: bool) -> np.ndarray:
    """What is kept of big_vision's tensors in our order, 1-D."""
    found = [value.detach().float().numpy() for value in values]
    if big_visions and each in BIG_VISIONS:
        found = [value.transpose(np.argsort(BIG_VISIONS[each][2])) for value in found]
    return np.concatenate([value.ravel() for value in found])


def timms(name: str, big_visions: bool) -> dict[tuple[str, str], np.ndarray]:
    """Weights and state after ten updates by timm's optimizer, of one process, in fp32.

    With `big_visions` it is given the tensors that a Vision Transformer of big_vision has.
    """
    optimizers = pytest.importorskip("timm.optim")
    newton_schulz = optimizers.muon.zeropower_via_newtonschulz

    def in_fp32(matrix: torch.Tensor, *settings: Any, **options: Any) -> torch.Tensor:  # as ours on CPUs
        return newton_schulz(matrix.bfloat16(), *settings, **options | {"dtype": torch.float32}).bfloat16()

    weights = {
        each: [torch.nn.Parameter(part) for part in theirs(each, TENSORS.initial(each), big_visions)] for each in HOW
    }
    groups: list[dict[str, Any]] = [
        {"params": weights[each], "lr": TENSOR_RATE * factor, "weight_decay": decay}
        for each, (factor, decay) in HOW.items()
    ]
    if name == "lamb":
        optimizer = optimizers.Lamb(groups, betas=(0.9, 0.98), eps=1e-6, max_grad_norm=None)
    elif name == "adafactor":
        optimizer = optimizers.AdafactorBigVision(groups, min_dim_size_to_factor=16)
    else:
        for group, each in zip(groups, HOW, strict=True):
            group["use_fallback"] = each not in MATRICES
        optimizer = optimizers.Muon(groups)
    with mock.patch("timm.optim.muon.zeropower_via_newtonschulz", in_fp32):
        for step in range(TENSOR_UPDATES):
            for each, parameters in weights.items():
                gradients = theirs(each, TENSORS.numbers(each, step), big_visions)
                for parameter, part in zip(parameters, gradients, strict=True):
                    parameter.grad = part
            optimizer.step()
    found = {("master", each): ours(each, parameters, big_visions) for each, parameters in weights.items()}
    for each, parameters in weights.items():
        for kind, value in optimizer.state[parameters[0]].items():
            if isinstance(value, torch.Tensor) and kind != "step":
                states = [optimizer.state[parameter][kind] for parameter in parameters]
                found[kind, each] = ours(each, states, big_visions)
    return found


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    root = tmp_path_factory.mktemp("whole")
    for world in sorted({params["world"] for params in asked(request) if "world" in params}):
        on_ranks(world, update_tensors, root, {case: content(case, world) for case in CASES})
    return root


def whole(root: Path, case: str, world: int) -> dict[tuple[str, str], np.ndarray]:
    """What the ranks own, put together."""
    return put_together(root / f"{case}-world{world}-{rank}.npz" for rank in range(world))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_ten_updates_are_timms(updated, case, world):
    name, *_, variant = CASES[case]
    expected = timms(name, name == "adafactor" and variant != "-as-stored") | {
        ("master", FROZEN): TENSORS.initial(FROZEN)
    }
    found = whole(updated, case, world)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # Of a difference in the last bit of fp32, the rounding to bf16 may make one of its own.
        coarse = {"adafactor": "exp_avg", "muon": ""}.get(name) == key[0]
        np.testing.assert_allclose(found[key], value, rtol=1e-2 if coarse else 1e-5, atol=1e-5, err_msg=str(key))


def error_of_muon(gradient, expected):
    made = -0.2 * np.sqrt(max(gradient.shape)) * orthogonal(gradient.bfloat16(), 1e-7).double()
    return float((made - expected).norm() / expected.norm())


@pytest.mark.parametrize(("rows", "columns"), [(48, 32), (32, 48)])
@pytest.mark.parametrize("smallest", [1.0, 1e-4])
def test_the_noise_of_muon_is_that_of_its_momentum_and_missing_steps_are_beyond_it(
    rows, columns, smallest, monkeypatch
):
    """Singular values from 1 down to the smallest: the proof's limit is the larger of 64 units and twice the noise."""
    rule, update = rule_of(Muon(name="muon", lr=1.0)), Update((rows, columns), 1, 1.0, 0.0, 0.0)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        left, right = (
            torch.linalg.qr(torch.randn(n, 32, generator=generator, dtype=torch.float64))[0] for n in (rows, columns)
        )
        gradient = left * torch.logspace(0, np.log10(smallest), 32, dtype=torch.float64) @ right.mT
        before = {
            "master": torch.zeros(rows, columns, dtype=torch.float64),
            "momentum_buffer": torch.zeros(1, dtype=torch.float64),
        }
        expected = rule.reference(update, before, gradient)["master"]
        limit = max(64 * 2.0**-8, 2 * rule.noise(update, before, gradient))
        assert error_of_muon(gradient, expected) < limit < 1
        with monkeypatch.context() as patched:
            patched.setattr(muon, "_COEFFICIENTS", muon._COEFFICIENTS[:-2])
            assert error_of_muon(gradient, expected) > limit
    assert (limit > 0.25) == (smallest < 1)


# ---- In training -----------------------------------------------------------------------------------------------------

MOVES = {
    f"{name}-{one[0]}x{one[1]}-to-{other[0]}x{other[1]}": (name, one, other)
    for name in OPTIMIZERS
    for one, other in (((2, 1), (1, 3)), ((2, 2), (4, 1)), ((2, 3), (4, 0)), ((2, 0), (4, 2)), ((2, 3), (1, 0)))
}
QUICK_MOVES = {"lamb-2x1-to-1x3", "adafactor-2x1-to-1x3", "muon-2x1-to-1x3"}
QUICK_RESUMED = {("lamb", 2), ("adafactor", 1), ("adafactor", 3), ("muon", 1), ("muon", 3)}
RESUMED = [(name, stage) for name in OPTIMIZERS for stage in range(4)]


def training(name: str, stage: int, precision: str = "bf16", **others: Any) -> dict[str, Any]:
    settings = {**OPTIMIZERS[name], "lr": 3e-3, "clip_norm": 1.0, "decay_exclude": "bias|norm", "layer_decay": 0.8}
    return {
        **{"precision": precision, "batch": {"global": 12, "micro_max": 4}},
        "optimizer": {**settings, "groups": [{"match": r"blocks\.1\.mlp", "frozen": True}]},
        **{"schedule": {"momentum": {"to": 0.8}}, "parallelism": {"zero_stage": stage}, "ema": {"decay": 0.4}},
        **{"evaluation": {"validation": None}, "checkpoint": {"keep": 20}},
        **others,
    }


@pytest.fixture(scope="module")
def root(root: Path, request: pytest.FixtureRequest) -> Path:
    parameters = asked(request)
    jobs = [job(f"{name}-fp32", training(name, 1, "fp32"), None) for name in OPTIMIZERS]
    for name, stage in dict.fromkeys((params["name"], params["stage"]) for params in parameters if "stage" in params):
        jobs.append(job(f"{name}-zero{stage}", training(name, stage, model={"dropout": 0.2}), None))
        jobs.append(job(f"{name}-zero{stage}-stopped", training(name, stage, model={"dropout": 0.2}), 4, None))
    moves = {params["move"]: MOVES[params["move"]] for params in parameters if "move" in params}
    for name, one, _ in dict.fromkeys(moves.values()):
        if not any(each["name"] == f"{name}-from-{one[1]}" for each in jobs):
            jobs.append(job(f"{name}-from-{one[1]}", training(name, one[1], "fp32"), 3))
    launch(root, jobs, 2)
    for world in (1, 4):
        jobs = [
            job(move, training(name, other[1], "fp32"), None, begins_as=f"{name}-from-{one[1]}", faults=[save_at_once])
            for move, (name, one, other) in moves.items()
            if other[0] == world
        ]
        launch(root, jobs, world)
    return root


@pytest.mark.parametrize(
    ("name", "stage"),
    [pytest.param(*each, marks=[] if each in QUICK_RESUMED else pytest.mark.slow) for each in RESUMED],
)
def test_a_run_that_was_stopped_goes_on_to_the_last_bit(root, name, stage):
    assert_same_run(root, f"{name}-zero{stage}-stopped", f"{name}-zero{stage}")


@pytest.mark.parametrize("move", quick_of(MOVES, QUICK_MOVES))
def test_on_another_world_and_stage_it_goes_on_as_it_was(root, move):
    name, one, _ = MOVES[move]
    before, after = checkpoint(root, f"{name}-from-{one[1]}", 3), checkpoint(root, move, 3)
    taken = everything(before)
    assert taken.keys() == everything(after).keys()
    assert all(torch.equal(taken[key], value) for key, value in everything(after).items()), "what it was given"
    np.testing.assert_allclose(column(root, move, "loss"), column(root, f"{name}-fp32", "loss"), atol=1e-4)
    assert column(root, move, "step") == list(range(1, STEPS + 1))


def test_a_checkpoint_of_factors_tells_their_shapes(root):
    index = checkpoint(root, "adafactor-fp32").index
    assert index.kinds == ["master", "exp_avg", "exp_avg_sq", "exp_avg_sq_c", "exp_avg_sq_r", "ema"]
    weight = "blocks.0.attention.qkv.weight"
    assert index.shapes[weight] == [96, 32]
    shapes = [index.shape_of(f"exp_avg_sq{kind}", weight) for kind in ("_r", "_c", "")]
    assert shapes == [[3, 2, 16, 1], [3, 2, 1, 32], None]
    assert index.shape_of("exp_avg_sq", "norm.bias") == [32] and index.shape_of("exp_avg_sq_r", "norm.bias") is None
    muon = checkpoint(root, "muon-fp32").index
    assert muon.shape_of("momentum_buffer", weight) == [96, 32] and muon.shape_of("exp_avg", weight) is None
    for name in OPTIMIZERS:
        found, recipe = checkpoint(root, f"{name}-fp32").index, make_recipe(root, **training(name, 1, "fp32"))
        assert 0 <= checkpoint_bytes(recipe, 7) / found.bytes - 1 < 0.7, "small tensors, whose keys count"


# ---- Before training -------------------------------------------------------------------------------------------------


def test_groups_of_muon_are_of_matrices_or_of_none(tmp_path):
    recipe = make_recipe(tmp_path, model={"depth": 2}, optimizer={**OPTIMIZERS["muon"], **GROUPED})
    model = LinearLoss(TENSORS)
    names = {parameter: name for name, parameter in model.named_weights()}
    for group in parameter_groups(recipe, model):
        found = {names[parameter] for parameter in group["params"]}
        assert found <= MATRICES or not found & MATRICES
    nothing = make_recipe(tmp_path, model={"depth": 2}, optimizer={**OPTIMIZERS["muon"], "matrices": "nowhere"})
    with pytest.raises(RecipeError, match=r"optimizer\.matrices"):
        parameter_groups(nothing, model)


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32)])
def test_orthogonal_is_near_to_the_matrix_with_the_same_singular_vectors(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix.bfloat16(), 1e-7).float()
    singular = torch.linalg.svdvals(found)
    assert singular.min() > 0.5 and singular.max() < 1.3
    assert torch.nn.functional.cosine_similarity(found.flatten(), (u @ vh).flatten(), dim=0) > 0.98


@pytest.mark.parametrize("name", ["ViT-Ti/16", "ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-H/14", "R50+ViT-B/16", "many"])
def test_adafactor_keeps_what_big_vision_keeps_of_its_tensors(tmp_path, name):
    """By optax' rule, of the arrays of Google's npz: the two longest sides, a tensor whole if one is below 32."""
    many = {"name": None, "patch_size": 16, "width": 1024, "depth": 1, "mlp_dim": 64, "num_heads": 32}
    model = many if name == "many" else {"name": name, "depth": 1}
    recipe = validate_recipe(
        {**make_recipe(tmp_path).dump(), "model": model, "data": {"train": "train", "image_size": 224}}
        | {"optimizer": {"name": "adafactor", "lr": 1.0}},
        "test",
    )
    with torch.device("meta"):
        model = build_model(recipe, 1000)
    parameters = dict(model.named_parameters())
    for rule in table(model, "npz"):
        expected = 0
        for array in rule.split(parameters[rule.ours]):
            *_, second, longest = sorted((1, 1, *array.shape))
            is_factored = array.ndim > 1 and second >= 32
            expected += array.numel() // longest + array.numel() // second if is_factored else array.numel()
        kept = recipe.kept(rule.ours, tuple(parameters[rule.ours].shape))
        found = sum(math.prod(shape) for kind, shape in kept.items() if kind != "exp_avg")
        assert found == expected, (rule.ours, kept)


def test_a_run_from_before_by_head_goes_on_as_it_was(tmp_path):
    """Its recipe has all defaults written out, but not this one."""
    new = make_recipe(tmp_path, optimizer={"name": "adafactor", "lr": 1e-3})
    old = new.dump()
    del old["optimizer"]["by_head"]
    earlier = validate_recipe(old, "earlier")
    assert differences(earlier.dump(), new.dump()) == ["optimizer.by_head: False -> True"]
    weight = "blocks.0.attention.qkv.weight"
    assert earlier.kept(weight, (96, 32))["exp_avg_sq_c"] == (96, 1)


def test_memory_and_checkpoints_follow_from_what_is_kept():
    """Of ViT-B/16: Adafactor has a half of fp32 momentum and next to nothing else, Muon one number of each matrix."""
    adamw = load_recipe("b16_i1k")
    with torch.device("meta"):
        parameters = dict(build_objective(adamw, 1000).named_weights())
    total = sum(p.numel() for p in parameters.values())
    matrices = sum(p.numel() for name, p in parameters.items() if "blocks." in name and p.ndim == 2)
    held, saved = {}, {}
    for name, settings in {"adamw": {"name": "adamw", "lr": 1.0}, **OPTIMIZERS}.items():
        recipe = adamw.model_copy(update={"optimizer": make_recipe(Path(), optimizer=settings).optimizer})
        recipe = recipe.model_copy(update={"precision": "bf16"})
        held[name] = expected_memory(recipe, 1000, 4, device="cuda").optimizer * 4 / total
        saved[name] = checkpoint_bytes(recipe, 1000) / total
    assert held["adamw"] == held["lamb"] == pytest.approx(12, abs=0.01)
    assert held["adafactor"] == pytest.approx(6, abs=0.05)
    assert held["muon"] == pytest.approx(12 - 4 * matrices / total, abs=0.01)
    assert saved["adafactor"] == pytest.approx(8, abs=0.05), "checkpoints are fp32"
    assert saved["muon"] == pytest.approx(held["muon"], abs=0.05)
