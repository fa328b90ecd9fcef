"""Fine-tuning as a whole against a loop of PyTorch around transformers' model, and what goes wrong in it elsewhere."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import assert_same_run, checkpoint, column, everything
from ranks import asked, batches, job, launch, make_recipe, quick_of

from vitscale.cli.export import export

transformers = pytest.importorskip("transformers")
zoom = pytest.importorskip("scipy.ndimage").zoom

UPDATES = 10
STEPS = UPDATES + 1  # the first has the learning rate 0
WARMUP, RATE, CLIP, BATCH, CLASSES = 3, 0.1, 1.5, 16, 7
OLD, NEW, PATCH = 32, 48, 8  # pixels
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
STAGES = {"fp32": range(4), "bf16": (1, 3)}  # in which momentum is kept
CASES = {f"{dtype}-zero{stage}": (stage, dtype) for dtype, stages in STAGES.items() for stage in stages}


def fine_tuning(weights: Path, stage: int, momentum_dtype: str) -> dict[str, Any]:
    """Each of two ranks takes four micro-batches an update."""
    return {
        **{"precision": "fp32", "model": {"depth": 2, "head": "linear"}, "init": {"from": str(weights)}},
        "data": {"train": "train", "image_size": NEW, "normalise": {"mean": MEAN, "std": STD}},
        **{"batch": {"global": BATCH, "micro_max": 2}, "objective": {"loss": "softmax"}},
        "optimizer": {"name": "sgd", "lr": RATE, "momentum": 0.9, "momentum_dtype": momentum_dtype, "clip_norm": CLIP},
        "schedule": {"duration": {"steps": STEPS}, "warmup": {"steps": WARMUP}, "decay": "cosine"},
        **{"parallelism": {"zero_stage": stage}, "evaluation": {"validation": None}},
    }


@pytest.fixture(scope="module")
def root(root: Path, request: pytest.FixtureRequest) -> Path:
    """The weights of transformers, and all runs that begin with them."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-6,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=OLD,
        patch_size=PATCH,
        num_labels=5,
        initializer_range=0.2,
    )
    model = transformers.ViTForImageClassification(config)
    model.save_pretrained(root / "weights")
    transformers.ViTImageProcessor(image_mean=MEAN, image_std=STD).save_pretrained(root / "weights")
    names = {"bf16-zero1", *(params["name"] for params in asked(request) if "name" in params)}
    jobs = [job(name, fine_tuning(root / "weights", *CASES[name])) for name in sorted(names)]
    jobs.append(job("bf16-zero1-cut", fine_tuning(root / "weights", 1, "bf16"), 5, None))
    launch(root, jobs, 2)
    return root


def loop(root: Path, momentum_dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """(weights, losses, norms of gradients) of one process that takes whole batches."""
    config = transformers.ViTConfig.from_pretrained(root / "weights")
    old = transformers.ViTForImageClassification.from_pretrained(root / "weights").state_dict()
    config.image_size, config.num_labels = NEW, CLASSES
    model = transformers.ViTForImageClassification(config)
    (name,) = [name for name in old if name.endswith("position_embeddings")]
    grid = old[name][0, 1:].reshape(OLD // PATCH, OLD // PATCH, -1).numpy()
    factor = NEW / OLD
    resampled = torch.from_numpy(zoom(grid, (factor, factor, 1), order=1)).flatten(0, 1)
    old[name] = torch.cat([old[name][0, :1], resampled])[None]
    old["classifier.weight"], old["classifier.bias"] = torch.zeros(CLASSES, 32), torch.zeros(CLASSES)
    model.load_state_dict(old)
    parameters = list(model.parameters())
    momenta = [torch.zeros_like(parameter, dtype=momentum_dtype) for parameter in parameters]
    losses, norms = [], []
    recipe = make_recipe(root, **fine_tuning(root / "weights", 0, "fp32"))
    for step, (batch, _) in enumerate(batches(recipe, STEPS)):
        pixels = (batch.images.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
        logits = model(pixel_values=pixels.permute(0, 3, 1, 2)).logits
        loss = torch.nn.functional.cross_entropy(logits, batch.labels)
        model.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, CLIP).item())
        losses.append(loss.item())
        progress = max(step - WARMUP, 0) / (STEPS - WARMUP)
        rate = RATE * min(1.0, step / WARMUP) * (1 + math.cos(math.pi * progress)) / 2
        with torch.no_grad():
            for parameter, momentum in zip(parameters, momenta, strict=True):
                direction = 0.9 * momentum.float() + parameter.grad
                parameter -= rate * direction
                momentum.copy_(direction)
    return model.state_dict(), losses, norms


@pytest.fixture(scope="module")
def loops(root: Path) -> dict[str, tuple[dict[str, torch.Tensor], list[float], list[float]]]:
    return {name: loop(root, dtype) for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))}


@pytest.mark.parametrize("name", quick_of(CASES, ("fp32-zero0", "fp32-zero2", "fp32-zero3", "bf16-zero1")))
def test_ten_updates_equal_a_plain_loop_around_transformers_model(root, loops, name, tmp_path):
    weights, losses, norms = loops[CASES[name][1]]
    assert max(norms[1:]) > CLIP > min(norms[1:]), "clipping takes part in some updates"
    assert losses[0] == pytest.approx(math.log(CLASSES)) and losses[-1] < losses[0] - 0.1
    assert column(root, name, "loss") == pytest.approx(losses, rel=1e-5)
    assert column(root, name, "grad_norm") == pytest.approx(norms, rel=1e-4)
    export(str(root / "runs" / name), "hf", tmp_path / "hf")
    found = transformers.ViTForImageClassification.from_pretrained(tmp_path / "hf").state_dict()
    assert found.keys() == weights.keys()
    differences = torch.cat([(found[key] - expected).abs().flatten() for key, expected in weights.items()])
    if CASES[name][1] == "bf16":
        # Another order of sums may round an element of the momentum to the other side, which is seldom seen: by 2^-8 of
        # a value that clipping holds below CLIP / (1 - 0.9).
        assert differences.max() < RATE * CLIP / (1 - 0.9) * 2**-8
        differences = differences.sort().values[: -len(differences) // 1000]
    assert differences.max() < 1e-5


def test_momentum_in_bf16_is_another_run_and_is_kept_exactly(root, loops):
    (in_fp32, *_), (in_bf16, *_) = loops["fp32"], loops["bf16"]
    assert max((in_fp32[key] - in_bf16[key]).abs().max().item() for key in in_fp32) > 1e-4
    assert_same_run(root, "bf16-zero1-cut", "bf16-zero1", STEPS)
    momenta = [value for key, value in everything(checkpoint(root, "bf16-zero1", STEPS)).items() if "momentum" in key]
    assert momenta and all(torch.equal(value, value.bfloat16().float()) for value in momenta)
