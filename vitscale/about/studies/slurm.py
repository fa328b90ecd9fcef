"""Runs entries as array jobs of Slurm, each a launch on a node. The jobs outlive this process, which only watches.

Entries that become ready at the same time are submitted as one array. A file in the study's folder records the jobs, so
that a repetition watches those that are still in the queue.
"""

import json
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from vitscale.about.studies.engine import LOG_FILE
from vitscale.ground.errors import EXIT_DONE, PeerLostError, PreemptedError, RecipeError, VitscaleError
from vitscale.ground.files.durable import make_folder, write_text
from vitscale.launch import Pretraining
from vitscale.launch.clusters import Job
from vitscale.launch.clusters.slurm import hand_in, render_array
from vitscale.runs.done import read_done
from vitscale.runs.launches import read_launches
from vitscale.runs.names import LAUNCH_FILE
from vitscale.runs.reading import read_object

JOBS_FILE = "slurm-jobs.json"
"""The file of entry -> number of its job, as ARRAY_INDEX."""
_ASK_EVERY_SECONDS = 5.0


class SlurmEngine:
    """Submits array jobs, by default of as many entries at a time as there is room for, and watches the queue.

    All nodes must reach the study's folder. Options are sbatch's, and `python` and `srun` as in
    `vitscale launch --cluster slurm`. Raises `RecipeError` if there is no Slurm.
    """

    def __init__(self, folder: Path, slots: int | None, options: Mapping[str, str]) -> None:
        self._folder, self._slots, self._options = folder, slots, options
        self._told = False
        self._asked_at = time.monotonic()
        known = read_object(folder / JOBS_FILE) or {}
        queued = _queued()
        self._jobs = {str(name): str(job) for name, job in known.items() if job in queued}

    @property
    def running(self) -> Collection[str]:
        return self._jobs.keys()

    @property
    def room(self) -> int:
        return sys.maxsize  # Slurm takes them all

    def start(self, works: Sequence[Pretraining]) -> None:
        """Submit one array. Raises `RecipeError` if sbatch does not take it."""
        run_dirs = [what.run_dir for what in works if what.run_dir is not None]
        for run_dir in run_dirs:
            make_folder(run_dir)
        jobs = [Job(what, options=self._options) for what in works]
        number = hand_in(render_array(jobs, self._folder.absolute().name, self._folder, LOG_FILE, self._slots))
        self._jobs |= {run_dir.name: f"{number}_{index}" for index, run_dir in enumerate(run_dirs)}
        write_text(self._folder / JOBS_FILE, json.dumps(self._jobs, indent=1) + "\n")

    def ended(self) -> Mapping[str, int]:
        """Entries whose job has left the queue, with exit codes; all of them, once this process is told to end."""
        if self._told:
            found = dict.fromkeys(self._jobs, PreemptedError.exit_code)
        elif not self._jobs or time.monotonic() - self._asked_at < _ASK_EVERY_SECONDS:
            return {}
        else:
            self._asked_at = time.monotonic()
            try:
                queued = _queued()
            except RecipeError:
                return {}  # a controller that does not answer is asked again
            found = {name: _exit_code(self._folder / name) for name, job in self._jobs.items() if job not in queued}
        for name in found:
            del self._jobs[name]
        return found

    def tell_to_end(self) -> None:
        self._told = True  # to watch no longer: the jobs continue, and `scancel` ends them

    def kill(self) -> None:
        """Do nothing: the jobs continue."""


def _queued() -> set[str]:
    """The array jobs in the queue, as ARRAY_INDEX. Raises `RecipeError` if Slurm cannot be asked."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%F_%K"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise RecipeError("--engine slurm: there is no squeue here: run this where jobs are submitted") from None
    if answer.returncode:
        reason = answer.stderr.strip().rpartition("\n")[2]
        raise RecipeError(f"--engine slurm: squeue does not answer: {reason}")
    return set(answer.stdout.split())


def _exit_code(run_dir: Path) -> int:
    """The exit code of a launch whose job is over; the code for "repeat" if it left none."""
    if read_done(run_dir) is not None:
        return EXIT_DONE
    try:
        last = read_launches(run_dir / LAUNCH_FILE).last
    except VitscaleError:
        last = None
    return (last.exit_code if last is not None else None) or PeerLostError.exit_code
