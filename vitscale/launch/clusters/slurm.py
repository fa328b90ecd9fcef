"""A Slurm job: one batch script, which runs a launch on every node and requeues itself until the run is done."""

import math
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from vitscale.ground.errors import RecipeError, os_errors
from vitscale.ground.files.durable import make_folder
from vitscale.launch.clusters import Job, checked_recipe, launch_command, one_line, read_options, shell_words
from vitscale.launch.nodes import Layout
from vitscale.launch.pretraining import PretrainingRanks
from vitscale.launch.supervisor import say
from vitscale.runs.directory import check_run_dir
from vitscale.runs.names import RECIPE_FILE

_SIGNAL_SECONDS = 300

# Options of sbatch that the command line or the script sets -> what to use instead.
_OURS = {
    "nodes": "--nodes",
    "time": "--time-limit",
    "ntasks": "--ranks",
    "ntasks-per-node": "--ranks",
    "requeue": "--max-restarts",
    "no-requeue": "--max-restarts 0",
}

_BEFORE = """
# What Slurm tells this script it tells the tasks as well. They save, and srun waits for them: in a session of its own,
# it is not told, and does not kill them.
told=
trap told=1 TERM
# srun would not take this over from the job.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# All tasks end together and with one code, by themselves; --wait is for those that are left when one was killed.
"""

_AFTER = r"""code=$?

case $code in
    0) exit 0 ;;
    2 | 3 | 4) echo "slurm: exit code $code: not requeued, as it would end like this again" >&2; exit $code ;;
esac
[ -z "$told" ] || exit $code # cancelled, or requeued by Slurm itself

# Requeue while the run gets on: a step beyond all that were reached before begins the count again.
# What lies in the directory may be a stranger's: only files are read, only numbers are believed, links are replaced.
files() { find "$run_dir" -maxdepth 1 -type f "(" -name "$1" -o -name "$2" ")" -exec cat {} +; }
step=$(files launch.jsonl metrics.jsonl | grep -oE '"step": [0-9]{1,15}' | sort -n -k 2 | tail -n 1)
step=${step##* }
counter=.slurm-$SLURM_JOB_ID
read -r furthest in_a_row <<<"$(files "$counter" "$counter")"
[[ "$furthest $in_a_row" =~ ^[0-9]{1,15}\ (0|[1-9][0-9]{0,5})$ ]] || furthest=0 in_a_row=0
[ "${step:-0}" -le "$furthest" ] || furthest=$step in_a_row=0
if [ "$in_a_row" -ge "$max_requeues" ]; then
    echo "slurm: exit code $code: not requeued; requeues in a row without a further step: $in_a_row" >&2
    exit $code
fi
echo "slurm: exit code $code after step ${step:-0}: requeued" >&2
rm -f "$run_dir/$counter"
echo "$furthest $((in_a_row + 1))" >"$run_dir/$counter"
scontrol requeue "$SLURM_JOB_ID" || exit $code
sleep 60 # until Slurm ends this script
"""


class SlurmOptions(BaseModel):
    """The `--cluster-option`s that are not sbatch's own."""

    tasks: Literal["node", "rank"] = "node"  # srun starts a launch a node, which watches its ranks, or the ranks
    python: str = sys.executable  # on the nodes, with what it runs in: "apptainer exec --nv vitscale.sif python"
    srun: str = ""  # options for srun, such as those for containers


def render(job: Job) -> str:
    """The batch script, for sbatch; the run directory must exist when it starts."""
    recipe, run_dir, ranks = checked_recipe(job, "slurm"), job.what.directory, job.what.ranks
    if job.what.resume == "never" and not job.what.smoke:
        check_run_dir(recipe, run_dir, may_resume=False)
    elif job.what.resume == "never" and (run_dir / RECIPE_FILE).exists():
        raise RecipeError(f"{run_dir} already holds a run; leave out --resume never")

    own, of_sbatch = _read_options(job)
    if own.tasks == "rank" and ranks is None:
        raise RecipeError("--cluster-option tasks=rank needs --ranks, the number of ranks per node")
    # Every job after the first one continues the run, and the limit is that of each job.
    what = replace(job.what, run_dir=run_dir, resume="auto", time_limit_minutes=None)
    python = shell_words("python", own.python)
    if own.tasks == "node":
        command = launch_command(replace(job, what=what), [*python, "-m", "vitscale"])
        command += ["--wait-for-nodes", f"{job.wait_for_nodes_minutes:g}"]
    else:
        [rank] = PretrainingRanks(what).commands(Layout(1, 0, 1, "", 0), 0)
        command = [*python, "-m", "vitscale.pretrain", *rank.command[2:]]
    per_node = ranks if own.tasks == "rank" else 1
    options = {"job-name": run_dir.absolute().name, "nodes": job.nodes or 1, "ntasks-per-node": per_node}
    options |= _common(run_dir, "%j") | _time_limit(job, of_sbatch) | of_sbatch
    return _script(options, f"run_dir={shlex.quote(str(run_dir))}\n", own.srun, shlex.join(command), job.max_restarts)


def render_array(jobs: Sequence[Job], name: str, folder: Path, log: str, at_once: int | None = None) -> str:
    """The batch script of a job array, whose n-th task is the n-th of these launches, each on one node.

    The output of the scripts goes to `folder`, which must exist when they start, that of each launch to the file `log`
    in its run directory. At most `at_once` run at a time. The options are those of the first job. Raises `RecipeError`
    for impossible ones.
    """
    own, of_sbatch = _read_options(jobs[0])
    if own.tasks != "node":
        raise RecipeError("--engine-option tasks: an entry of a study is a launch on one node")
    python = shell_words("python", own.python)
    cases = []
    for index, job in enumerate(jobs):
        command = shlex.join(launch_command(job, [*python, "-m", "vitscale"]))
        run_dir = shlex.quote(str(job.what.directory))
        cases.append(one_line(f"    {index}) run_dir={run_dir}; set -- {command} ;;") + "\n")
    array = f"0-{len(jobs) - 1}" + (f"%{at_once}" if at_once else "")
    options = (
        {"job-name": name, "array": array, "nodes": 1, "ntasks-per-node": 1} | _common(folder, "%A_%a") | of_sbatch
    )
    chosen = f'case $SLURM_ARRAY_TASK_ID in\n{"".join(cases)}esac\nexec >>"$run_dir"/{shlex.quote(log)} 2>&1\n'
    return _script(options, chosen, own.srun, '"$@"', jobs[0].max_restarts)


def _common(folder: Path, job: str) -> dict[str, object]:
    """The options of every script: it runs in this folder, and writes its output, with the job's number, to another."""
    return {
        "chdir": Path.cwd(),
        "output": str(folder.absolute()).replace("%", "%%") + f"/slurm-{job}.out",
        "open-mode": "append",
        "requeue": "",
        "signal": f"TERM@{_SIGNAL_SECONDS}",
    }


def _script(options: Mapping[str, object], begin: str, srun: str, command: str, max_requeues: int) -> str:
    """A batch script that runs a command on every node of its job; `begin` sets run_dir."""
    values = {name: shlex.quote(str(value)) if value else "" for name, value in options.items()}
    lines = [one_line(f"#SBATCH --{name}{'=' if value else ''}{value}") for name, value in values.items()]
    starts = shlex.join(["setsid", "--wait", "srun", "--kill-on-bad-exit=0", "--wait=30", *shell_words("srun", srun)])
    head = "\n".join(["#!/bin/bash", *lines])
    return f"{head}\n\n{begin}max_requeues={max_requeues}\n{_BEFORE}{one_line(f'{starts} {command}')}\n{_AFTER}"


def submit(job: Job) -> int:
    """Submit the script. Returns the exit code of `vitscale launch`. Raises `RecipeError` if Slurm does not take it."""
    script, run_dir = render(job), job.what.directory
    with os_errors(f"{run_dir}: cannot be made", RecipeError):
        make_folder(run_dir)
    number = hand_in(script)
    say(f"job {number}, whose output is {run_dir}/slurm-{number}.out; scancel {number} saves and ends it")
    return 0


def hand_in(script: str) -> str:
    """Submit a script by sbatch. Returns the job's number. Raises `RecipeError` if sbatch does not take it."""
    try:
        answer = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    except FileNotFoundError:
        raise RecipeError("there is no sbatch here: run this where jobs are submitted, or see --dry-run") from None
    if answer.returncode:
        raise RecipeError(f"sbatch rejected the job: {answer.stderr.strip()}")
    return answer.stdout.strip().partition(";")[0]  # the name of the cluster follows, if there are several


def _read_options(job: Job) -> tuple[SlurmOptions, dict[str, str]]:
    """Our options, and those of sbatch, which checks them itself."""
    ours = {name: value for name, value in job.options.items() if name in SlurmOptions.model_fields}
    theirs = {name: value for name, value in job.options.items() if name not in ours}
    for name, value in theirs.items():
        if name in _OURS:
            raise RecipeError(f"--cluster-option {name}: use {_OURS[name]}")
        if not re.fullmatch(r"[a-z][a-z-]*", name) or not value.isprintable():
            raise RecipeError(f"--cluster-option {name}={value!r}: expected an option of sbatch without its dashes")
    return read_options(replace(job, options=ours), SlurmOptions), theirs


def _time_limit(job: Job, of_sbatch: dict[str, str]) -> dict[str, str]:
    minutes = job.what.time_limit_minutes
    if minutes is None:
        return {}
    if "signal" not in of_sbatch and 60 * minutes < 2 * _SIGNAL_SECONDS:
        raise RecipeError(
            f"--time-limit {minutes:g}: the run saves {_SIGNAL_SECONDS} s before the end of the job; "
            f"take {2 * _SIGNAL_SECONDS // 60} minutes or more, or say when to save: --cluster-option signal=TERM@60"
        )
    return {"time": str(math.ceil(minutes))}
