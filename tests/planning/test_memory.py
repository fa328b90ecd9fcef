"""The estimate by its parts, and the micro-batch that fits."""

from pathlib import Path

import pytest
from toy_recipes import make_recipe

from vitscale.ground.machine import available_memory, has_bf16_instructions
from vitscale.training.beginning.memory import USABLE, expected_memory, fitting_micro_batch, largest_micro_batch
from vitscale.training.deepspeed.config import derive_config

WIDE = {"patch_size": 14, "width": 4096, "depth": 2, "mlp_dim": 16384, "num_heads": 32}
SMALL = {"name": "ViT-Ti/16", "depth": 3}
IN_FRONT = {"background": False}
PARAMETERS = 2 * 12 * 4096**2 + 4096 * (4096 + 588 + 257 + 1000)  # of it, without biases and norms


def test_states_are_the_rule_of_thumb():
    """Rajbhandari et al. (2020): 2 + 2 + 12 bytes a parameter, of which a stage more is divided by the ranks each."""
    for stage, expected in ((0, 16), (1, 2 + 14 / 64), (2, 2 + 14 / 64), (3, 16 / 64)):
        recipe = make_recipe(WIDE, batch={"global": 64 * 2, "micro_max": 2}, parallelism={"zero_stage": stage})
        memory = expected_memory(recipe, 1000, 64, device="cuda")
        states = memory.weights + memory.gradients + memory.optimizer
        assert states == pytest.approx(expected * PARAMETERS, rel=0.02), stage


def test_offloading_moves_the_optimizer_to_the_host():
    # Wide, as with an offloaded optimizer DeepSpeed's buckets of a constant size are on the device.
    recipes = (make_recipe(WIDE, parallelism={"offload": on}, checkpoint=IN_FRONT) for on in ("none", "optimizer"))
    on_device, on_host = (expected_memory(recipe, 1000, 1, device="cuda") for recipe in recipes)
    assert on_device.optimizer > 0 and on_device.host_optimizer == 0
    assert on_host.optimizer == 0 and on_host.host_optimizer >= on_device.optimizer
    assert on_host.host_bytes > on_device.host_bytes and on_host.device_bytes < on_device.device_bytes


def test_average_and_background_copy_follow_the_masters():
    plain = expected_memory(make_recipe(SMALL, 96, checkpoint=IN_FRONT), 10, 1)
    averaged = expected_memory(make_recipe(SMALL, 96, ema={}), 10, 1)
    masters = plain.optimizer // 3
    assert averaged.ema == masters and plain.ema == plain.host_checkpoint == 0
    assert averaged.host_checkpoint == pytest.approx(4 * masters, abs=64)


def test_what_the_loader_keeps():
    recipe = make_recipe(SMALL, 96, batch={"global": 12, "micro_max": 2})
    assert expected_memory(recipe, 10, 2).host_loader == (2 + 3) * 6 * 96 * 96 * 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_largest_micro_batch_is_the_last_that_fits(device):
    recipe = make_recipe(SMALL, 96, batch={"global": 8, "micro_max": 4})
    sizes = [1, 2, 4]
    needs = {size: expected_memory(recipe, 10, 2, size, device).device_bytes for size in sizes}
    for size in (4, 2):
        found = largest_micro_batch(recipe, 10, 2, needs[size], device)
        assert found == max(other for other in sizes if needs[other] <= needs[size]) >= size
    assert largest_micro_batch(recipe, 10, 2, min(needs.values()) - 1, device) is None


def test_an_automatic_micro_batch_is_the_largest_that_fits_and_divides():
    recipe = make_recipe(SMALL, 96, batch={"global": 24, "micro_max": "auto"})
    needs = {size: expected_memory(recipe, 10, 2, size, "cuda").device_bytes for size in (1, 2, 3, 4, 6, 12)}
    for size, most in needs.items():
        found = fitting_micro_batch(recipe, 10, 2, 1.02 * most / USABLE)  # it interpolates, which counts a little more
        assert size <= found and needs[found] <= 1.02 * most
    assert fitting_micro_batch(recipe, 10, 2, 80e9) == 12
    assert fitting_micro_batch(recipe, 10, 2, 1e6) == 1


def test_elements_in_flight_are_those_that_training_asks_for():
    recipe = make_recipe(WIDE, parallelism={"zero_stage": 3})
    asked = derive_config(recipe, 1)["zero_optimization"]
    more = {key: 2 * asked[key] for key in ("reduce_bucket_size", "sub_group_size", "stage3_max_live_parameters")}
    as_asked = {key: asked[key] for key in more}

    def memory(sizes: dict[str, int]):
        changed = make_recipe(WIDE, parallelism={"zero_stage": 3}, deepspeed={"zero_optimization": sizes})
        return expected_memory(changed, 10, 1, device="cuda")

    assert memory(as_asked) == memory({}) != memory(more)


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def test_memory_of_a_machine_and_of_its_control_groups(tmp_path, monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert available_memory(tmp_path) is None and has_bf16_instructions(tmp_path) is None
    files = {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8192 kB\n",
        **{"proc/cpuinfo": "flags\t\t: fpu avx512f avx512_bf16\n", "proc/self/cgroup": "0::/slice/job\n"},
        **{"sys/fs/cgroup/slice/memory.max": "6000000\n", "sys/fs/cgroup/slice/memory.current": "4000000\n"},
        "sys/fs/cgroup/slice/memory.stat": "anon 3000000\ninactive_file 1000000\n",
        **{"sys/fs/cgroup/slice/job/memory.max": "max\n", "sys/fs/cgroup/slice/job/memory.current": "1\n"},
        "sys/fs/cgroup/slice/job/memory.stat": "inactive_file 0\n",
    }
    write(tmp_path, files)
    assert available_memory(tmp_path) == 3_000_000
    assert has_bf16_instructions(tmp_path) is True
    (tmp_path / "sys/fs/cgroup/slice/memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 8192 * 1024
    (tmp_path / "proc/cpuinfo").write_text("flags\t\t: fpu avx2\n")
    assert has_bf16_instructions(tmp_path) is False


def test_an_old_control_group_limits_too(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "11:cpu,cpuacct:/x\n4:memory:/slurm\n"})
    found = {"limit_in_bytes": "5000\n", "usage_in_bytes": "3000\n", "stat": "total_inactive_file 500\n"}
    write(tmp_path, {f"sys/fs/cgroup/memory/slurm/memory.{name}": content for name, content in found.items()})
    assert available_memory(tmp_path) == 2500
