"""Devices that compute wrongly are found and named, on two and three real DeepSpeed ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from outcomes import error_of
from rank_faults import flip_bit, wrong_layer
from ranks import job, launch

from vitscale.training.watching.replicas import checksum

TYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64, torch.uint8: torch.uint8}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits, those of NaN too."""
    dtype = draw(st.sampled_from(list(TYPES)))
    width = torch.empty(0, dtype=dtype).element_size()
    content = draw(st.binary(min_size=2 * width, max_size=40 * width))
    return torch.frombuffer(bytearray(content[: len(content) // width * width]), dtype=dtype)


@given(tensors())
def test_the_checksum_is_the_sum_of_odd_multiples_of_the_bits(tensor):
    """As the multiples are odd and differ, every flipped bit and every two elements that change places are seen."""
    expected = sum((2 * index + 1) * bits for index, bits in enumerate(tensor.view(TYPES[tensor.dtype]).tolist()))
    assert checksum(tensor) == expected % 2**64
    assert checksum(tensor.view(-1, 1).expand(-1, 3)[:, 1]) == expected % 2**64


def test_of_a_tensor_in_several_pieces_too():
    bits = torch.arange((1 << 22) + 5, dtype=torch.int32).to(torch.int16)
    expected = (bits.long() * torch.arange(1, 2 * len(bits), 2)).sum()
    assert checksum(bits.view(torch.bfloat16)) == int(expected) % 2**64


def blocks(stage: int, precision: str = "bf16", **others: Any) -> dict[str, Any]:
    return {
        **{"precision": precision, "batch": {"global": 12, "micro_max": 4}, "parallelism": {"zero_stage": stage}},
        **{"evaluation": {"validation": None}, "checkpoint": {"every": {"steps": 2}}},
        "check": {"replicas_every": 1000},
        **others,
    }


def flipped(name: str, step: int, rank: int, content: dict[str, Any]) -> dict[str, Any]:
    return job(name, content, faults=[partial(flip_bit, step=step, rank=rank)])


def miscomputed(name: str, rank: int, layer: str, stage: int) -> dict[str, Any]:
    content = blocks(stage, check={"recompute_every": 2})
    return job(name, content, faults=[partial(wrong_layer, step=3, rank=rank, layer=layer)])


# Saved for being the best so far, at a step that has no save of its own.
BEST = {
    "evaluation": {"validation": "test", "batch": 6, "every": {"steps": 3}},
    "selection": {"metric": "validation/loss", "mode": "min"},
}
LAYERS = ("head", "blocks.0.attention.qkv", "embedding", "head")  # of bf16, one bit may get lost on a longer way
TWO = {
    **{f"flip-zero{stage}": flipped(f"flip-zero{stage}", 4, 1, blocks(stage)) for stage in range(3)},
    "flip-fp32": flipped("flip-fp32", 3, 0, blocks(0, "fp32")),
    "flip-at-the-end": flipped("flip-at-the-end", 6, 0, blocks(1, checkpoint={})),
    "flip-best": flipped("flip-best", 3, 1, blocks(1, **BEST)),
    "flip-unsaved": flipped("flip-unsaved", 3, 1, blocks(2, check={"replicas_every": 3})),
    **{f"wrong-zero{stage}": miscomputed(f"wrong-zero{stage}", stage % 2, LAYERS[stage], stage) for stage in range(4)},
}
THREE = {
    "flip-of-three": flipped("flip-of-three", 4, 2, blocks(1)),
    "flip-fp32-of-three": flipped("flip-fp32-of-three", 4, 0, blocks(0, "fp32")),
    "wrong-of-three": miscomputed("wrong-of-three", 1, LAYERS[1], 2),
}


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    """Every training that the tests below look at."""
    launch(root, list(TWO.values()), 2)
    launch(root, list(THREE.values()), 3)
    return root


@pytest.mark.parametrize(
    ("name", "found_at", "saved"),
    [
        *((f"flip-zero{stage}", 4, [2]) for stage in range(3)),
        ("flip-fp32", 4, [2]),  # the weights stay as they are for a step
        ("flip-at-the-end", 6, []),
        ("flip-best", 3, [2]),
        ("flip-unsaved", 3, [2]),
    ],
)
def test_a_flipped_bit_is_found_before_it_is_saved(root, name, found_at, saved):
    error = error_of(root, name)
    assert error["kind"] == "ReplicaError" and error["code"] == 75
    assert f"step {found_at}:" in error["message"]
    assert all(f"rank {rank} " in error["message"] for rank in (0, 1))
    assert error["saved"] == saved


@pytest.mark.parametrize("stage", range(4))
def test_a_layer_that_is_off_by_one_bit_is_found(root, stage):
    error = error_of(root, f"wrong-zero{stage}")
    assert error["kind"] == "ReplicaError" and error["code"] == 75
    assert "step 4:" in error["message"] and "rank 0" in error["message"]
    assert "no majority" in error["message"] and error["saved"] == [2]


@pytest.mark.parametrize(("name", "rank"), [("flip-of-three", 2), ("flip-fp32-of-three", 0), ("wrong-of-three", 1)])
def test_of_three_ranks_the_odd_one_is_named(root, name, rank):
    error = error_of(root, name)
    assert error["kind"] == "ReplicaError" and f"rank {rank} " in error["message"]
    assert error["saved"] == [2]
