"""What the trainer adds to a step of its own engine: loader, digest, losses, checks, metrics.

    python benchmarks/trainer_overhead.py [--models ViT-Ti/16 ViT-B/16] [--batch 32] [--rounds 11] [--json]

One process takes turns: some steps of the trainer with its real loader, a digest of every batch and a line of metrics
for every step, then as many of the bare engine (forward, loss, backward, update) on one of those batches. The loader's
threads share the cores, but the pictures are small: decoding is measured by `loader.py`.

Fails where the trainer adds more than 2 %: where the whole confidence interval of the median says so.
"""

import argparse
import json
import os
import statistics
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.multiprocessing as mp
from paired import median_ratio
from rank_engines import join
from step_recipe import make_recipe

LIMIT = 0.02


def work(_: int, model: str, batch: int, rounds: int, folder: Path) -> None:
    """A process for one model; its result goes to a file."""
    from vitscale.data.image_operations import to_model_input
    from vitscale.data.shards.generated import write_generated_dataset
    from vitscale.ground.machine import free_port
    from vitscale.models import weight_dtype
    from vitscale.training.beginning.run_plan import open_loader, plan_run
    from vitscale.training.deepspeed.profile import StepTimer
    from vitscale.training.loop.trainer import Trainer

    write_generated_dataset(folder / "train", [8 * batch])
    logging = {"every": 1, "batch_digest": True, "tensorboard": True}
    recipe = make_recipe(model, batch, folder=str(folder), logging=logging)
    trainer: Any = Trainer(plan_run(recipe, 0, 1), folder / "run", join(0, 1, int(free_port())))
    engine = trainer.learner.engine.deepspeed
    engine.train()
    trainer.report.begin_at(0)
    results: dict[str, list[float]] = {"trainer": [], "engine": []}
    with open_loader(trainer.plan, trainer.world, 0, 100_000) as loader:
        batches = iter(loader)
        first = next(batches)

        def bare(number: int) -> None:
            for _ in range(number):
                images = to_model_input(first.images, trainer.world.device, weight_dtype(recipe))
                loss = engine(images, first.labels).per_sample.mean()
                engine.backward(loss)
                engine.step()
                loss.item()

        def whole(number: int) -> None:
            pace = StepTimer(trainer.state.step)
            for batch in pace.timed(islice(batches, number)):
                trainer.take_step(batch, pace)

        contenders = {"trainer": whole, "engine": bare}
        whole(2)
        began = time.perf_counter()
        bare(2)
        number = max(2, round(6 / (time.perf_counter() - began)))  # some seconds
        for turn in range(rounds):
            for name in sorted(contenders, reverse=bool(turn % 2)):
                began = time.perf_counter()
                contenders[name](number)
                results[name].append((time.perf_counter() - began) / number)
    (folder / "results.json").write_text(json.dumps(results))
    os._exit(0)


def compare(model: str, batch: int, rounds: int) -> dict[str, Any]:
    """The share that the trainer adds, for one model."""
    with TemporaryDirectory() as folder:
        mp.spawn(work, (model, batch, rounds, Path(folder)))
        found = json.loads((Path(folder) / "results.json").read_text())
    ratio = median_ratio(found["trainer"], found["engine"])
    return {
        "model": model,
        "batch": batch,
        "overhead": ratio.median - 1,
        "overhead_from": ratio.low - 1,
        "overhead_to": ratio.high - 1,
        "engine_s": statistics.median(found["engine"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["ViT-Ti/16", "ViT-B/16"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # this is about CPUs
    results = [compare(model, options.batch, options.rounds) for model in options.models]
    if options.json:
        print(json.dumps({"results": results}))
    else:
        print(f"{'model':<12}{'overhead':>9}{'(from - to)':>18}{'engine':>12}")
        for one in results:
            print(
                f"{one['model']:<12}{one['overhead']:>9.2%}{one['overhead_from']:>9.2%} -{one['overhead_to']:>7.2%}"
                f"{one['engine_s']:>10.3f} s"
            )
    if any(one["overhead_from"] > LIMIT for one in results):
        raise SystemExit(f"missed: the trainer is to add less than {LIMIT:.0%}")


if __name__ == "__main__":
    main()
