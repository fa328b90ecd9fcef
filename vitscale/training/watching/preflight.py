"""Checks that need all ranks: same code, same run directory, enough memory and disk.

A few exchanges between the ranks, whatever their number, before there is a model.
"""

import hashlib
import importlib
import json
import os
import platform
import secrets
import shutil
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import vitscale
from vitscale.evaluation.linear import AttentiveHeads
from vitscale.evaluation.splits import check_splits
from vitscale.ground.errors import MachineError, RecipeError, StorageError, os_errors
from vitscale.ground.files.durable import make_folder
from vitscale.ground.machine import available_memory, has_bf16_instructions
from vitscale.ground.ranks import gather, on_rank_zero, write_on_rank_zero
from vitscale.ground.wording import counted, listed
from vitscale.recipe import Recipe, changes
from vitscale.runs.checkpoint import LocalDirectory, checkpoint_directory
from vitscale.training.beginning.automatic import missing_for_compiling
from vitscale.training.beginning.memory import Memory, expected_memory, largest_micro_batch
from vitscale.training.beginning.run_plan import RunPlan
from vitscale.training.beginning.tensors import DeviceType
from vitscale.training.deepspeed.distributed import World
from vitscale.training.deepspeed.fragments import checkpoint_bytes
from vitscale.training.deepspeed.lean_deepspeed import deepspeed
from vitscale.training.watching.trackers import absent_packages

_SHARED_WITHIN_SECONDS = 5.0  # a network file system may be late with what another machine has written
_OF_EACH_MACHINE = ("root", "cache")  # keys of `data` that may differ: where the data lie, not what they are
_NAMED = 4
_DIGITS = 16  # of a sha256
_FIRST_WITH_FLOAT8 = (8, 9)  # compute capability


def preflight(plan: RunPlan, run_dir: Path, world: World) -> list[str]:
    """Compare the ranks and their machines with each other and with what the run will need; all ranks call it together.

    Returns lines to print, the same on all ranks except for the seconds: warnings, and a summary.

    Raises on all ranks alike `RecipeError` for what would keep the run from beginning or ending, `DataError` if it
    would be evaluated on its training samples, and `StorageError` if a resumed run has no room for its next checkpoint.
    """
    began, recipe = time.monotonic(), plan.recipe
    device: DeviceType = "cuda" if world.device.type == "cuda" else "cpu"
    ranks = [_Rank(**seen) for seen in gather(asdict(_look_around(plan, world)))]
    _check_agreement(ranks, recipe)
    size = recipe, plan.num_classes, world.size, plan.micro_batch, device
    memory = Memory(**on_rank_zero(lambda: asdict(expected_memory(*size))))
    _check_able(ranks, recipe)
    warnings = on_rank_zero(lambda: check_splits(recipe, plan.manifest))
    warnings += _check_bf16(recipe, world, ranks)
    on_host = Counter(rank.host for rank in ranks)  # each rank may take an equal part of its machine's memory
    host = [None if rank.host_memory is None else rank.host_memory // on_host[rank.host] for rank in ranks]
    # What each rank has for its model; on the CPU that is host memory.
    left = [part if rank.device_memory is None else rank.device_memory for rank, part in zip(ranks, host, strict=True)]
    warnings += _check_memory(plan, ranks, memory, host, left)
    known = [bytes_left for bytes_left in left if bytes_left is not None]
    needs = f"{_binary(memory.device_bytes)}{f' of {_binary(min(known))}' if known else ''} a rank expected"
    directory = checkpoint_directory(recipe, run_dir)
    if isinstance(directory, LocalDirectory):
        _check_shared(Path(directory.root), world, ranks)
        of_checkpoint = checkpoint_bytes(recipe, plan.num_classes)
        free, about_room = on_rank_zero(lambda: _check_room(recipe, directory, of_checkpoint))
        warnings += about_room
        needs += f", checkpoints {_decimal(of_checkpoint)} each of {_decimal(free)} free"
    hosts = len({rank.host for rank in ranks})
    who = f"{counted(len(ranks), 'rank')} on {counted(hosts, 'host')} {'agree' if len(ranks) > 1 else 'ready'}"
    threads = f"{counted(torch.get_num_threads(), 'thread')} each; " if device == "cpu" else ""
    summary = f"preflight: {who}; {threads}{needs} ({time.monotonic() - began:.1f} s)"
    return [*(f"WARNING: {warning}" for warning in warnings), summary]


@dataclass(frozen=True)
class _Rank:
    host: str
    identity: dict[str, str]  # what must be the same on all ranks, in words -> its digest or version
    device_memory: int | None  # bytes free on its CUDA device; None on CPUs
    host_memory: int | None  # bytes free on its machine, for all its ranks together; None if unknown
    has_bf16: bool | None  # whether the device has bf16 arithmetic of its own; None if unknown
    without_compiler: str  # what it lacks for compiling; empty if nothing, or if there is nothing to compile
    without_float8: str  # why it cannot train in float8; empty if it can, or need not


def _look_around(plan: RunPlan, world: World) -> _Rank:
    recipe = plan.recipe
    identity = {
        "code of vitscale (sha256)": code_fingerprint(Path(vitscale.__file__).parent),
        "version of torch": str(torch.__version__),
        "version of deepspeed": deepspeed.__version__,
        "version of Python": platform.python_version(),
        "recipe (sha256)": _digest(_canonical(recipe).encode()),
        "manifest of data.train (sha256)": plan.manifest.sha256[:_DIGITS],
    }
    free, has_bf16 = None, has_bf16_instructions()
    if world.device.type == "cuda":
        free, has_bf16 = torch.cuda.mem_get_info(world.device)[0], torch.cuda.is_bf16_supported(False)
    return _Rank(
        host=socket.gethostname(),
        identity=identity,
        device_memory=free,
        host_memory=available_memory(),
        has_bf16=has_bf16,
        without_compiler=missing_for_compiling(world.device.type) if recipe.parallelism.compiles else "",
        without_float8=_without_float8(world.device) if recipe.precision == "fp8" else "",
    )


def _without_float8(device: torch.device) -> str:
    try:
        importlib.import_module("vitscale.models.float8")
    except ImportError as error:
        return f"cannot import torchao ({error}): pip install torchao"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_WITH_FLOAT8:
        return f"has a {torch.cuda.get_device_name(device)}, which does not compute in float8: use precision bf16"
    return ""


def code_fingerprint(package: Path) -> str:
    """The beginning of a sha256 over names and contents of a package's Python and compiled files; or why not."""
    total = hashlib.sha256()
    try:
        for path in sorted(path for pattern in ("*.py", "*.so") for path in package.rglob(pattern)):
            total.update(f"{path.relative_to(package).as_posix()} {_digest(path.read_bytes())}\n".encode())
    except OSError as error:  # the other ranks wait for ours
        return f"unreadable: {error}"
    return total.hexdigest()[:_DIGITS]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]


def _canonical(recipe: Recipe) -> str:
    content = recipe.dump()
    for key in _OF_EACH_MACHINE:
        del content["data"][key]
    return json.dumps(content, sort_keys=True)


def _check_agreement(ranks: Sequence[_Rank], recipe: Recipe) -> None:
    """Raise `RecipeError` if not all ranks are the same, naming those that differ from most."""
    problems = []
    for what in ranks[0].identity:
        values = [rank.identity[what] for rank in ranks]
        (usual, number), *others = Counter(values).most_common()  # of equally common ones, rank 0's is the usual one
        for value, _ in others:
            where = _describe([index for index, other in enumerate(values) if other == value], ranks)
            problems.append(f"  {what}: {value} on {where}, {usual} on {counted(number, 'other rank')}")
    if not problems:
        return
    # All ranks see the same problems, so all come here.
    recipes = [json.loads(text) for text in gather(_canonical(recipe))]
    usual_recipe = Counter(map(str, recipes)).most_common(1)[0][0]
    usual = next(content for content in recipes if str(content) == usual_recipe)
    problems += dict.fromkeys(
        f"    {key}: {here!r}, elsewhere {there!r}" for other in recipes for key, there, here in changes(usual, other)
    )
    raise RecipeError(
        "the ranks of this launch differ:\n" + "\n".join(problems) + "\nStart all ranks with one command, "
        "on machines that have the same version of everything and the same data"
    ).on_all_ranks()


def _describe(indices: Sequence[int], ranks: Sequence[_Rank]) -> str:
    by_host: dict[str, list[int]] = {}
    for index in indices:
        by_host.setdefault(ranks[index].host, []).append(index)
    named = [
        f"{'rank' if len(of_host) == 1 else 'ranks'} {listed(of_host, _NAMED)} on {host}"
        for host, of_host in list(by_host.items())[:_NAMED]
    ]
    more = f"; and on {counted(len(by_host) - _NAMED, 'more host')}" if len(by_host) > _NAMED else ""
    return "; ".join(named) + more


def _check_bf16(recipe: Recipe, world: World, ranks: Sequence[_Rank]) -> list[str]:
    without = [index for index, rank in enumerate(ranks) if rank.has_bf16 is False]
    if recipe.precision == "fp32" or not without:
        return []
    where, advice = _describe(without, ranks), "--set precision=fp32"
    if world.device.type == "cuda":
        raise MachineError(
            f"precision {recipe.precision}: the device of {where} does not compute in it; use {advice}"
        ).on_all_ranks()
    return [
        f"precision {recipe.precision}: the processor of {where} has no instructions for it, and multiplies matrices "
        f"many times as slowly as in fp32; a run of its own (another --run-dir) with {advice} is faster"
    ]


def _check_able(ranks: Sequence[_Rank], recipe: Recipe) -> None:
    """Raise `MachineError` or `RecipeError` if a rank cannot do what the recipe asks for."""
    for key, reasons in {
        "parallelism.compile": [one.without_compiler and f"has no {one.without_compiler}" for one in ranks],
        "precision fp8": [one.without_float8 for one in ranks],
    }.items():
        for reason in sorted({*reasons} - {""}):
            where = _describe([index for index, other in enumerate(reasons) if other == reason], ranks)
            raise MachineError(f"{key}: {where} {reason}").on_all_ranks()
    if absent := on_rank_zero(lambda: absent_packages(recipe.logging.trackers)):
        raise RecipeError(
            f"logging.trackers: rank 0 lacks what they need: pip install {' '.join(absent)}, or leave them out"
        ).on_all_ranks()


def _check_memory(
    plan: RunPlan, ranks: Sequence[_Rank], memory: Memory, host: list[int | None], left: list[int | None]
) -> list[str]:
    """Warnings; `host` and `left` have the bytes of host memory and for its model that each rank has, if known."""
    warnings = []
    small = [index for index, part in enumerate(host) if part is not None and part < memory.host_bytes]
    if small:
        warnings.append(
            f"one rank is expected to need {_binary(memory.host_bytes)} of host memory, but {_describe(small, ranks)} "
            f"has less; --set checkpoint.background=false saves {_binary(memory.host_checkpoint)} of it"
        )
    tokens = max((each.host_bytes for each in plan.evaluators if isinstance(each, AttentiveHeads)), default=0)
    if (free := ranks[0].host_memory) is not None and tokens > free:
        warnings.append(
            f"evaluation.evaluators: the tokens that attentive heads learn from take {_binary(tokens)} of host memory, "
            f"but {_describe([0], ranks)} has {_binary(free)}: take a part of the images (vitscale shards split)"
        )
    known = [bytes_left for bytes_left in left if bytes_left is not None]
    if not known or memory.device_bytes <= (least := min(known)):
        return warnings
    where = _describe([left.index(least)], ranks)
    if memory.states > least:
        raise RecipeError(
            f"the model does not fit: weights, gradients and optimizer of one rank need {_binary(memory.states)}, but "
            f"{where} has {_binary(least)}. Use more ranks with parallelism.zero_stage 2 or 3, or parallelism.offload"
        ).on_all_ranks()
    size = plan.recipe, plan.num_classes, len(ranks), least, memory.device
    fitting = on_rank_zero(lambda: largest_micro_batch(*size))
    advice = "not even one image at a time is expected to fit: try parallelism.activation_checkpointing or .zero_stage"
    if fitting is not None:
        advice = f"batch.micro_max {fitting} should fit"
    return [
        *warnings,
        f"one rank is expected to need {_binary(memory.device_bytes)} with {plan.micro_batch} images at a time, but "
        f"{where} has {_binary(least)}; {advice}",
    ]


def _check_shared(folder: Path, world: World, ranks: Sequence[_Rank]) -> None:
    """Raise `RecipeError` unless all ranks see what rank 0 writes into the folder."""
    folder_of_main, name = on_rank_zero(lambda: (str(folder), f".preflight-{secrets.token_hex(8)}"))
    token = folder / name

    def write() -> None:
        make_folder(folder)
        for left in folder.glob(f".preflight-{'[0-9a-f]' * 16}"):  # of a killed launch: this one has claimed the run
            left.unlink()
        token.touch()

    write_on_rank_zero(write, folder)
    is_seen = gather(_appears(token))
    if world.is_main:
        with suppress(OSError):
            token.unlink()
    blind = [index for index, seen in enumerate(is_seen) if not seen]
    if blind:
        raise RecipeError(
            f"{folder_of_main} is not the same folder on all machines: a file that rank 0 on {ranks[0].host} wrote "
            f"there is not visible to {_describe(blind, ranks)}. Checkpoints need a shared file system: choose "
            "--run-dir on one, or set checkpoint.dir to a folder on one or to a URL"
        ).on_all_ranks()


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _SHARED_WITHIN_SECONDS
    while True:
        with suppress(OSError):
            # Listing the folders makes a network file system ask its server, not its cache.
            for folder in (path.parent.parent, path.parent):
                with os.scandir(folder) as entries:
                    next(entries, None)
            if path.exists():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def _check_room(recipe: Recipe, directory: LocalDirectory, checkpoint_bytes: int) -> tuple[int, list[str]]:
    """Tidy checkpoints -> (bytes free, warnings). `RecipeError`: the first does not fit, `StorageError`: the next."""
    with os_errors(f"{directory.root} cannot be read", RecipeError):
        directory.tidy()  # a save that was killed may have left as much as a checkpoint
        free, present = shutil.disk_usage(directory.root).free, len(directory.steps())
    keep = recipe.checkpoint.keep
    size, left = _decimal(checkpoint_bytes), f"{_decimal(free)} free"
    if free < 1.5 * checkpoint_bytes:
        # What has filled the disk since a run began may go away again, so the run is worth repeating.
        raise (StorageError if present else RecipeError)(
            f"{directory.root}: {left}, but a checkpoint takes {size}, and 1.5 times that must be free. Make room, or "
            "set checkpoint.dir to another folder or a URL"
        )
    to_come = max(1, keep + 1 - present)
    if free < to_come * checkpoint_bytes:
        return free, [
            f"{directory.root}: {left}, but {to_come} more checkpoints will take {size} each (checkpoint.keep is "
            f"{keep}, and one more exists while it is written)"
        ]
    return free, []


def _binary(size: float) -> str:
    """Memory in binary units, as its makers count it."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _decimal(size: int) -> str:
    """Room on a disk in decimal units, as its makers count it."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
