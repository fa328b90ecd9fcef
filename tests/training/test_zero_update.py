"""Updates in ZeRO 1 and 2 of one rank beside torch's AdamW and its clipping in fp32."""

import math

import numpy as np
import pytest
import torch
from known_gradients import ALONE_UPDATES, INFINITE, VECTORS, coefficients, rate, update_alone
from ranks import on_ranks

CLIP_NORM = 2.0
CASES = {
    f"zero{stage}-{precision}-{accumulation}{'-inside' * inside}": {
        "inside": inside,
        "precision": precision,
        "batch": {"global": 8, "micro_max": 8 // accumulation},
        "optimizer": {
            **{"name": "adamw", "lr": 1.0, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1},
            **{"decay_exclude": "bias$", "clip_norm": CLIP_NORM},
        },
        "parallelism": {"zero_stage": stage},
    }
    for stage in (1, 2)
    for precision in ("bf16", "fp32")
    for accumulation in (1, 4)
    for inside in (False, True)
}


@pytest.fixture(scope="module")
def updated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("updates")
    on_ranks(1, update_alone, folder, CASES)
    return folder


def by_torch(accumulation: int) -> tuple[list[float], list[dict[str, np.ndarray]]]:
    """The norms and, after each step, the weights."""
    weights = {name: torch.nn.Parameter(torch.from_numpy(VECTORS.initial(name))) for name in VECTORS.shapes}
    groups = [
        {"params": [weights[name] for name in VECTORS.shapes if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [weights[name] for name in VECTORS.shapes if name.endswith("bias")], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.8, 0.95), eps=1e-6)
    norms, after = [], []
    for step in range(ALONE_UPDATES):
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight)
        for micro_step in range(accumulation):
            for name, value in coefficients(step, micro_step).items():
                weights[name].grad.add_(torch.from_numpy(value) / accumulation)
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), CLIP_NORM)))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        if step != INFINITE:
            optimizer.step()
        after.append({name: weight.detach().numpy().copy() for name, weight in weights.items()})
    return norms, after


@pytest.mark.parametrize("case", CASES)
def test_updates_are_torch_s_and_one_with_an_infinite_gradient_is_not_made(updated, case):
    found, (norms, after) = np.load(updated / f"{case}.npz"), by_torch(4 if "-4" in case else 1)
    assert found["skipped"] == 1 and math.isinf(found["norms"][INFINITE])
    assert all(norm > CLIP_NORM for norm in norms)
    for step in range(ALONE_UPDATES):
        if step != INFINITE:
            assert found["norms"][step] == pytest.approx(norms[step], rel=1e-6)
        for name in VECTORS.shapes:
            np.testing.assert_allclose(found[f"{step}.{name}"], after[step][name], rtol=2e-6, atol=1e-6)
