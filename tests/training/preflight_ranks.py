"""What a rank of the preflight's tests does, with a copy of vitscale that it chooses itself."""

import json
import os
import sys
from pathlib import Path
from typing import Any

OTHER_RANK = 2
BATCH = {"batch": {"global": 24, "micro_max": 8}}


def run_jobs(rank: int, world_size: int, port: int, root: Path, jobs: list[dict[str, Any]]) -> None:
    """Entry point of a rank: each job is {name, and what differs from a good launch}; outcomes go to files.

    Ranks run one copy of the package, `root/code/vitscale`, and rank 2 another, `root/other-code/vitscale`. A job may
    have: `recipe` blocks for all ranks, `other` blocks for rank 2 alone, `manifest` and `run_dir` that only rank 2 has,
    `code` that is appended to a file of its package, a package `without` which it is, `checkpoint_bytes`, and
    the bytes of the `tokens` of evaluators. A job's outcome also has the bytes of every object that this rank gave to
    an all-gather.
    """
    is_other = rank == OTHER_RANK
    code = root / ("other-code" if is_other else "code")
    sys.path.insert(0, str(code))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vitscale", "ranks")]:
        del sys.modules[name]  # of the process that this one is a copy of
    import torch
    from ranks import join, make_recipe

    import vitscale

    world = join(rank, world_size, port)
    gathered = count_gathered()

    from dataclasses import replace

    from vitscale.data.shards import Manifest
    from vitscale.evaluation.linear import AttentiveHeads
    from vitscale.ground.errors import RecipeError
    from vitscale.training.beginning.run_plan import plan_run
    from vitscale.training.watching import preflight

    def attentive_heads(size: int) -> AttentiveHeads:
        return AttentiveHeads("attentive", lambda: [], lambda: [], [], host_bytes=size)

    preflight._SHARED_WITHIN_SECONDS = 0.5
    assert Path(vitscale.__file__).is_relative_to(code)
    plan = plan_run(make_recipe(root, **BATCH), rank, world_size)
    for job in jobs:
        recipe = make_recipe(root, **{**BATCH, **job.get("recipe", {})}, **(job.get("other", {}) if is_other else {}))
        own_plan = replace(plan, recipe=recipe, micro_batch=recipe.batch.split(world_size)[0])
        own_plan = replace(own_plan, evaluators=[attentive_heads(size) for size in job.get("tokens", [])])
        preflight.checkpoint_bytes = lambda *_, size=job.get("checkpoint_bytes", 1000): size
        run_dir = root / "run"
        changed = root / "other-code" / "vitscale" / "ground" / "errors.py"
        if is_other and "manifest" in job:
            own_plan = replace(own_plan, manifest=Manifest.load(str(root / job["manifest"])))
        if is_other and "run_dir" in job:
            run_dir = root / job["run_dir"]
        sys.modules.update(dict.fromkeys(job.get("without", []) if is_other else []))
        unchanged = changed.read_text() if is_other else ""
        if is_other:
            changed.write_text(unchanged + job.get("code", ""))
        outcome: dict[str, Any] = {}
        gathered.clear()
        try:
            outcome["lines"] = preflight.preflight(own_plan, run_dir, world)
        except RecipeError as error:
            outcome |= {"error": str(error), "on_all_ranks": error.is_on_all_ranks}
        outcome["gathered"] = list(gathered)
        if is_other:
            changed.write_text(unchanged)
            for name in job.get("without", []):
                del sys.modules[name]
        (root / f"{job['name']}-{rank}.json").write_text(json.dumps(outcome))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def count_gathered() -> list[int]:
    """A list to which every all-gather of bytes appends how many this rank gave; the gather is torch's."""
    import torch
    import torch.distributed as dist

    sizes: list[int] = []
    gather = dist.all_gather

    def counted(values: list, value: Any, group: Any = None) -> None:
        if value.dtype == torch.uint8:
            sizes.append(value.numel())
        gather(values, value, group)

    dist.all_gather = counted
    return sizes
