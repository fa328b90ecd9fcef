"""Settles what a recipe leaves to the device that it runs on: `precision`, `parallelism.compile` and `.overlap`."""

import os
import shutil
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import torch

from vitscale.ground.machine import has_bf16_instructions
from vitscale.recipe import Recipe, override, read_recipe
from vitscale.runs.names import RECIPE_FILE

_SEVERAL = 2  # ranks


def settle(recipe: Recipe, run_dir: Path, local_rank: int, world_size: int) -> tuple[Recipe, list[str]]:
    """The recipe without `auto` in these places, and what was chosen for a GPU and why, in words.

    A run keeps what it began with, also on other devices, unless its recipe names it.
    Raises `RecipeError` if the recipe does not go with what was chosen, or the run's own recipe cannot be read.
    """
    is_cuda = torch.cuda.is_available()
    choices: dict[str, Callable[[], tuple[object, str]]] = {
        "precision": lambda: _precision(local_rank),
        "parallelism.compile": lambda: compiling(recipe, missing_for_compiling("cuda") if is_cuda else None),
        "parallelism.overlap": lambda: overlapping(recipe, world_size if is_cuda else None),
    }
    left = [key for key in choices if attrgetter(key)(recipe) == "auto"]
    saved = run_dir / RECIPE_FILE
    began = read_recipe(saved) if left and saved.exists() else None
    settings, words = [], []
    # Chosen anew where the run goes on in another stage, or offloads, for which it cannot be kept.
    impossible = {
        "parallelism.compile": not compiling(recipe, "")[0],
        "parallelism.overlap": not overlapping(recipe, _SEVERAL)[0],
    }
    for key in left:
        value: object = "auto" if began is None else attrgetter(key)(began)
        reason = "which this run began with" if value or is_cuda else ""
        if value == "auto" or (value is True and impossible[key]):
            value, reason = choices[key]()
        settings.append(f"{key}={str(value).lower()}")
        if reason:
            words.append(f"{settings[-1].replace('=', ' ')}, {reason}")
    if not settings:
        return recipe, []
    return override(recipe.dump(), settings, f"with {'; '.join(words or settings)}, the recipe"), words


def _precision(local_rank: int) -> tuple[str, str]:
    if torch.cuda.is_available():
        device = local_rank % torch.cuda.device_count()
        computes = torch.cuda.get_device_properties(device).major >= 8 or torch.version.hip is not None
        reason = f"which {torch.cuda.get_device_name(device)} computes{'' if computes else '; it has no bf16'}"
        return "bf16" if computes else "fp32", reason
    if has_bf16_instructions():
        return "bf16", "for which this processor has instructions"
    return "fp32", "as this processor has no instructions for bf16"


def compiling(recipe: Recipe, missing: str | None) -> tuple[bool, str]:
    """Whether to compile the blocks, and why, in words; no words on CPUs, where results are to stay as they were.

    `missing` is what a GPU's machine lacks for it, in words, or nothing; None on CPUs.
    """
    if missing is None:
        return False, ""
    if recipe.parallelism.zero_stage == 3:
        return False, "as stage 3 gathers weights within a block"
    return not missing, f"as there is no {missing}" if missing else "as there is a compiler for the GPU"


def overlapping(recipe: Recipe, world_size: int | None) -> tuple[bool, str]:
    """Whether to send while computing, and why, in words; no words on CPUs, where it would change the last bits.

    `world_size` is the number of ranks on GPUs; None on CPUs.
    """
    settings = recipe.parallelism
    if world_size is None or world_size == 1:
        return False, ""
    if settings.zero_stage not in (1, 2):
        return False, f"which is there for stages 1 and 2, not {settings.zero_stage}"
    if settings.offload != "none" or recipe.deepspeed:
        return False, "as the recipe offloads the optimizer, or has a block `deepspeed`"
    return True, f"as {world_size} ranks train in stage {settings.zero_stage}"


def missing_for_compiling(device_type: str) -> str:
    """What this machine lacks for `parallelism.compile` on CUDA or the CPU, in words; empty if nothing."""
    if torch.__version__.startswith("2.10."):
        return "torch but 2.10, whose compiled blocks have wrong gradients (pytorch issues 190796, 193061)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h (sudo apt-get install -y python3-dev)"
    if device_type == "cuda":
        from torch.utils._triton import has_triton

        if not any(shutil.which(name) for name in (os.environ.get("CC", "gcc"), "clang")):
            return "C compiler (gcc, or what CC names)"
        return "" if has_triton() else "Triton for this GPU"
    if shutil.which("openssl") is None:  # torch uses it for the digests of headers that it precompiles
        return "program openssl"
    from torch._inductor import cpp_builder, exc

    with suppress(exc.InvalidCxxCompiler):
        if cpp_builder.get_cpp_compiler():
            return ""
    return "C++ compiler (g++, or what CXX names)"
