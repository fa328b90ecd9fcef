"""What an audit costs, as a share of training: the time of an audited update by that of a plain one.

    python benchmarks/audit_cost.py [--models ViT-Ti/16 ViT-B/16] [--batch 32] [--zero 1] [--ranks 1] [--json]

One process a rank, which takes turns: an update that is audited, then one that is not, on the same batch. The share is
what audits add to the time of a run that makes one every `check.audit_every` steps, by default of the recipe.

Fails where that is more than 0.5 %: where the whole confidence interval of the median says so.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.multiprocessing as mp
from paired import median_ratio
from rank_engines import join
from step_recipe import make_recipe

LIMIT = 0.005


def work(rank: int, ranks: int, port: int, model: str, batch: int, zero: int, rounds: int, folder: Path) -> None:
    """A rank; rank 0 writes the seconds of each update to a file."""
    from vitscale.training.beginning.run_plan import open_loader, plan_run
    from vitscale.training.loop.trainer import Trainer

    recipe = make_recipe(model, batch, ranks, folder=str(folder), parallelism={"zero_stage": zero})
    trainer: Any = Trainer(plan_run(recipe, rank, ranks), folder / "run", join(rank, ranks, port))
    trainer.learner.engine.deepspeed.train()
    results: dict[str, list[float]] = {"audited": [], "plain": []}
    with open_loader(trainer.plan, trainer.world, 0, 1) as loader:
        images = next(iter(loader))
        trainer.learner.update(images, 0)
        for turn in range(rounds):
            for name in sorted(results, reverse=bool(turn % 2)):
                began = time.perf_counter()
                update = trainer.learner.update(images, 1 + sum(map(len, results.values())), None, name == "audited")
                results[name].append(time.perf_counter() - began)
                assert not update.findings, update.findings
    if rank == 0:
        every = recipe.check.audit_every
        (folder / "results.json").write_text(json.dumps({**results, "every": every}))
    os._exit(0)


def compare(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """The share of one model's training."""
    from vitscale.data.shards.generated import write_generated_dataset
    from vitscale.ground.machine import free_port

    with TemporaryDirectory() as name:
        folder = Path(name)
        write_generated_dataset(folder / "train", [2 * options.batch * options.ranks])
        rest = (model, options.batch, options.zero, options.rounds, folder)
        mp.spawn(work, (options.ranks, int(free_port()), *rest), nprocs=options.ranks)
        found = json.loads((folder / "results.json").read_text())
    ratio, every = median_ratio(found["audited"], found["plain"]), found["every"]
    return {
        "model": model,
        "batch": options.batch,
        "every": every,
        "audited_by_plain": ratio.median,
        "share": (ratio.median - 1) / every,
        "share_from": (ratio.low - 1) / every,
        "share_to": (ratio.high - 1) / every,
        "plain_s": statistics.median(found["plain"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["ViT-Ti/16", "ViT-B/16"])
    parser.add_argument("--batch", type=int, default=32, help="images of a rank")
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # this is about CPUs
    results = [compare(model, options) for model in options.models]
    if options.json:
        print(json.dumps({"results": results}))
    else:
        print(f"{'model':<12}{'audited':>9}{'every':>7}{'share':>9}{'(from - to)':>20}{'plain':>11}")
        for one in results:
            print(
                f"{one['model']:<12}{one['audited_by_plain']:>8.2f}x{one['every']:>7,}{one['share']:>9.3%}"
                f"{one['share_from']:>10.3%} -{one['share_to']:>8.3%}{one['plain_s']:>9.3f} s"
            )
    if any(one["share_from"] > LIMIT for one in results):
        raise SystemExit(f"missed: audits are to cost less than {LIMIT:.1%}")


if __name__ == "__main__":
    main()
