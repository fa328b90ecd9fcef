"""Pre-train one recipe.

    deepspeed vitscale/pretrain.py --recipe recipes/h14_jft.yaml [--set KEY=VALUE ...] [--run-dir DIR]

Also under `torchrun` and plain `python` (one rank). Repeating the command continues the run.
"""

import sys
from pathlib import Path

# Started as a script, Python puts this file's own folder first, where `vitscale.checkpoint` and others would shadow
# packages of those names; the folder above is what makes `import vitscale` work without an installation.
_HERE = Path(__file__).resolve().parent
if sys.path and sys.path[0] and Path(sys.path[0]).resolve() == _HERE:
    sys.path[0] = str(_HERE.parent)

import argparse  # noqa: E402
import os  # noqa: E402

from vitscale.errors import EXIT_DONE, DataError, RecipeError, VitscaleError  # noqa: E402
from vitscale.recipe import Recipe, find_recipe, load_recipe  # noqa: E402


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; `--local_rank` is what the DeepSpeed launcher adds."""
    parser = argparse.ArgumentParser(prog="pretrain.py", description="Pre-train one recipe. Repeating it continues it.")
    parser.add_argument("--recipe", required=True, help="a file, or the stem of a recipe that comes with vitscale")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="override any field"
    )
    parser.add_argument("--run-dir", type=Path, help="default: runs/<recipe stem>")
    parser.add_argument(
        "--resume",
        choices=("auto", "never"),
        default="auto",
        help="auto continues what is in the run directory; never refuses a directory that holds a run",
    )
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="save and end after this step, to be continued")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """Entry point: one readable message and an exit code for what a person can mend, a trace for a bug."""
    options = parse_arguments()
    code = EXIT_DONE
    try:
        pretrain(options)
    except VitscaleError as error:
        code = error.exit_code
        _print_once(f"error: {error}")
    if "torch.distributed" in sys.modules:
        from vitscale.training.distributed import finish

        finish(code)
    sys.exit(code)


def pretrain(options: argparse.Namespace) -> None:
    """Check everything that can be checked alone, then start the process group and train."""
    recipe: Recipe = load_recipe(options.recipe, options.settings)
    run_dir: Path = options.run_dir or Path("runs") / find_recipe(options.recipe).stem
    if options.stop_at is not None and options.stop_at < 1:
        raise RecipeError(f"--stop-at {options.stop_at}: expected a step from 1")
    if options.resume == "never" and (run_dir / "recipe.yaml").exists():
        raise RecipeError(f"{run_dir} already holds a run; leave out --resume never to continue it")

    from vitscale.training import distributed
    from vitscale.training.trainer import Trainer, check_run_dir

    done = check_run_dir(recipe, run_dir)
    if done is not None:
        _print_once(f"{run_dir} holds a finished run; nothing to do\n{done.rstrip()}")
        return
    _, world_size, _ = distributed.read_environment()
    recipe.batch.split(world_size)
    world = distributed.start()
    trainer = Trainer(recipe, run_dir, world)
    try:
        trainer.run(options.stop_at)
    except DataError as error:
        # Only the rank that reads a damaged sample knows of it, so it speaks for itself.
        print(f"error: rank {world.rank}: {error}", file=sys.stderr, flush=True)
        distributed.finish(error.exit_code)


def _print_once(message: str) -> None:
    """Print on rank 0; the others fail alike and keep quiet."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr if message.startswith("error") else sys.stdout, flush=True)


if __name__ == "__main__":
    main()
