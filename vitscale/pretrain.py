"""The program that every rank runs: pre-trains one recipe.

    deepspeed vitscale/pretrain.py --recipe recipes/h14_jft.yaml [--set KEY=VALUE ...] [--run-dir DIR]

Also under `torchrun`, `srun`, `mpirun` and plain `python` (one rank). Repeating the command continues the run.
"""

import sys
from pathlib import Path

# For a script, Python puts the file's own folder first in sys.path, where `vitscale/models` and others would shadow
# packages of those names; with the folder above, `import vitscale` works without an installation.
_HERE = Path(__file__).resolve().parent
if sys.path and sys.path[0] and Path(sys.path[0]).resolve() == _HERE:
    sys.path[0] = str(_HERE.parent)

import signal  # noqa: E402

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during these imports ends without a stack trace

import argparse  # noqa: E402
import contextlib  # noqa: E402
import faulthandler  # noqa: E402
import os  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

from vitscale.ground.errors import EXIT_DONE, PeerLostError, PreemptedError, RecipeError, VitscaleError, os_errors  # noqa: E402
from vitscale.ground.files.durable import forbid_writing_by_everybody  # noqa: E402
from vitscale.ground.heartbeat import HEARTBEAT_VARIABLE, tell_launch_why  # noqa: E402
from vitscale.ground.interruption import Interruption  # noqa: E402
from vitscale.ground.machine import divide_memory_finely, share_cores  # noqa: E402
from vitscale.ground.safe_text import indented, protect_output  # noqa: E402
from vitscale.launch import Pretraining, read_environment  # noqa: E402
from vitscale.recipe import override, refuse_secrets, smoke_form  # noqa: E402

if TYPE_CHECKING:
    from vitscale.training.beginning.run_plan import RunPlan
    from vitscale.training.deepspeed.distributed import World


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the DeepSpeed launcher adds `--local_rank`."""
    parser = argparse.ArgumentParser(prog="pretrain.py", description="Pre-train one recipe. Repeating it continues it.")
    parser.add_argument("--recipe", required=True, help="a file, or the name of a recipe that comes with vitscale")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="override any field"
    )
    parser.add_argument("--run-dir", type=Path, help="default: runs/<recipe name>")
    parser.add_argument(
        "--resume",
        choices=("auto", "never"),
        default="auto",
        help="auto continues what is in the run directory; never refuses a directory that holds a run",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="the recipe shrunk to a small model of its family and four steps, on generated pictures",
    )
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="save and end after this step, to be continued")
    parser.add_argument(
        "--time-limit", type=float, metavar="MINUTES", help="save and end after so many, to be continued; exit code 85"
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """Entry point: a readable message and an exit code for errors that people can mend, a stack trace for bugs."""
    options = parse_arguments()
    forbid_writing_by_everybody()
    share_cores()
    divide_memory_finely()
    protect_output()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the stacks of all threads to standard error
    code = EXIT_DONE
    try:
        pretrain(options)
    except VitscaleError as error:
        code = error.exit_code
        tell_launch_why(str(error))
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not error.is_on_all_ranks:
            speaker = "" if rank == "0" or isinstance(error, PeerLostError) else f"rank {rank}: "
            kind = "" if isinstance(error, PreemptedError) else "error: "
            with contextlib.suppress(OSError):  # a terminal that was closed
                sys.stderr.write(f"{kind}{speaker}{indented(str(error))}\n")  # in one call, as other ranks write too
                sys.stderr.flush()
    if "vitscale.training.deepspeed.distributed" in sys.modules:
        sys.modules["vitscale.training.deepspeed.distributed"].finish(code)
    sys.exit(code)


def write_smoke_data(data_root: Path, world_size: int) -> None:
    """Write the pictures that a smoke form trains on, a few batches of them. Raises `RecipeError`."""
    from vitscale.data.shards.generated import write_generated_dataset

    with os_errors(f"{data_root}: cannot be written", RecipeError):
        write_generated_dataset(data_root / "train", [96, 96, max(64, 16 * world_size)], seed=0)
        write_generated_dataset(data_root / "test", [40], seed=1)


def pretrain(options: argparse.Namespace) -> None:
    """Check everything that one rank can check alone, then start the process group and train."""
    rank, world_size, local_rank, _ = read_environment()  # every rank reports its errors, which may be its own alone
    with Interruption(
        # Rank 0's clock alone decides: another rank's, seconds ahead, would end the run as by a signal to that rank.
        None if options.time_limit is None or rank != 0 else 60 * options.time_limit,
        answers=rank == 0 and HEARTBEAT_VARIABLE not in os.environ,  # `vitscale launch` answers itself
    ) as interruption:
        try:
            what = Pretraining(options.recipe, options.settings, options.run_dir, smoke=options.smoke)
            recipe, run_dir = what.load(), what.directory
            if options.stop_at is not None and options.stop_at < 1:
                raise RecipeError(f"--stop-at {options.stop_at}: expected a step from 1")
            if options.time_limit is not None and not options.time_limit > 0:
                raise RecipeError(f"--time-limit {options.time_limit:g}: expected minutes above 0")

            if recipe.check.recompute_every is not None:  # read when CUDA starts: products add in one order
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

            # Imported only once there is something to train, as it takes seconds.
            from vitscale.runs.directory import check_run_dir
            from vitscale.training.beginning.automatic import settle
            from vitscale.training.beginning.initial_weights import (
                check_initial_weights,
                check_teacher,
                settle_functions,
            )
            from vitscale.training.beginning.memory import settle_micro_max
            from vitscale.training.beginning.run_plan import plan_run
            from vitscale.training.deepspeed import distributed
            from vitscale.training.deepspeed.progress import tell
            from vitscale.training.loop.resuming import check_branch

            smoke_data = run_dir / f"smoke-data-{world_size}"
            if options.smoke:
                small = smoke_form(recipe, smoke_data, world_size).dump()
                recipe = refuse_secrets(override(small, options.settings, "the smoke form"), "the smoke form")
            recipe, chosen = settle(recipe, run_dir, local_rank, world_size)
            recipe, functions = settle_functions(recipe, run_dir)
            done = check_run_dir(recipe, run_dir, may_resume=options.resume == "auto")
            if done is not None:
                if os.environ.get("RANK", "0") == "0":
                    tell(f"{run_dir} holds a finished run; nothing to do\n{done}")
                return
            if options.smoke:
                write_smoke_data(smoke_data, world_size)
            recipe, chosen_size = settle_micro_max(recipe, run_dir, local_rank, world_size)
            plan = plan_run(recipe, rank, world_size)
            check_initial_weights(recipe, list(plan.manifest.class_names), run_dir)
            check_teacher(recipe, list(plan.manifest.class_names))
            check_branch(plan, run_dir)
            for words in [*chosen, functions, chosen_size] if rank == 0 else []:
                if words is not None:
                    tell(words)
        except VitscaleError as error:
            if os.environ.get("LOCAL_RANK", "0") != "0":
                error.on_all_ranks()  # ranks of one machine see the same recipe and files, so its first one reports
            raise
        train(plan, run_dir, distributed.start(rank, world_size, local_rank), interruption, options.stop_at)


def train(
    plan: "RunPlan", run_dir: Path, world: "World", interruption: Interruption | None = None, stop_at: int | None = None
) -> None:
    """Train, and turn a failing collective or allocation into an error that explains it. Raises VitscaleError."""
    from vitscale.training.deepspeed import distributed
    from vitscale.training.loop.trainer import Trainer
    from vitscale.training.watching.out_of_memory import explain, is_out_of_memory
    from vitscale.training.watching.watchdog import Watchdog

    with Watchdog(world, plan.recipe.check.step_timeout_s) as watchdog:
        try:
            Trainer(plan, run_dir, world, watchdog.at, interruption).run(stop_at)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise explain(plan, world) from None
            if not distributed.is_lost_peer(error):
                raise
            reason = str(error).strip().splitlines()[0].partition(". ")[0]  # without gloo's own advice
            raise PeerLostError(f"rank {world.rank} lost {watchdog.who_is_missing()}: {reason}") from None


if __name__ == "__main__":
    main()
