"""Runs a study: starts entries as they become ready, decides choices, keeps results.json up to date.

The run directories alone tell what is finished, so that a study may be killed and repeated at any moment.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from vitscale.about.studies.engine import LOG_FILE, Engine
from vitscale.about.studies.expansion import Entry, Expansion
from vitscale.about.studies.forecast import FORECASTS_FILE, METRIC, Forecast, Point, forecasts_text, read_forecasts
from vitscale.about.studies.outcomes import Progress, StudyState, changed_fields, read_outcome
from vitscale.about.studies.results import RESULTS_FILE, About, results_text
from vitscale.flops.estimate import estimate
from vitscale.ground.errors import EXIT_DONE, DataError, RecipeError, VitscaleError, os_errors
from vitscale.ground.files.durable import make_folder, write_text
from vitscale.ground.files.locks import LockFile, try_lock
from vitscale.ground.storage import regular
from vitscale.launch import Pretraining, Supervisor
from vitscale.launch.ends import EXIT_BUG, EXIT_DATA, EXIT_NON_FINITE, EXIT_PREEMPTED, EXIT_RECIPE, EXIT_RETRY

_LOOK_EVERY_SECONDS = 0.2
_LOCK_FILE = ".lock"
_LOG_END_BYTES = 1 << 16
# Exit codes of entries, the worst first.
_SEVERITY = (EXIT_BUG, EXIT_RECIPE, EXIT_DATA, EXIT_NON_FINITE, EXIT_RETRY, EXIT_PREEMPTED)


class StudyRun(StudyState):
    """One study in one folder, which has a directory for each entry, and results.json.

    `look` is called again and again with this object, to show it to people.
    """

    def __init__(
        self,
        expansion: Expansion,
        folder: Path,
        engine: Engine,
        about: About,
        look: Callable[["StudyRun"], None] = lambda run: None,
    ) -> None:
        super().__init__(expansion)
        self.folder, self.forecasts = folder, read_forecasts(folder)
        self._is_ending = False  # as a signal has asked
        self._engine, self._about, self._look = engine, about, look
        self._known: Any = None

    def run(self) -> int:
        """Run the study. Returns 0 if all entries are done, 85 if told to end before, else the worst code of an entry.

        Raises `RecipeError` if another process runs a study in the folder, and `DataError` if results.json cannot be
        written.
        """
        self._find_begun()
        with _claimed(self.folder), Supervisor() as signals:  # without ranks: it only notes the signals to end
            try:
                while self._step(signals):
                    self._look(self)
                    time.sleep(_LOOK_EVERY_SECONDS)
            except BaseException:
                self._engine.kill()
                raise
            self._look(self)
            self._write_results()
        return self._code()

    def _step(self, signals: Supervisor) -> bool:
        """Note what has ended and start what is ready. Returns whether there may be more to do.

        The first signal asks all entries to save and end, a later one ends them.
        """
        for name, code in self._engine.ended().items():
            self._note_end(name, code)
        if signals.told is not None and not self._is_ending:
            self._is_ending = True
            self._engine.tell_to_end()
        if signals.at_once:
            signals.at_once = False
            self._engine.kill()
        ready = [] if self._is_ending else list(itertools.islice(self._ready(), self._engine.room))
        if ready := [entry for entry in ready if self._forecast_if_due(entry)]:
            options = [(entry.name, entry.option(self.label_of(entry))) for entry in ready]
            works = [Pretraining(option.source, option.settings, self.folder / name) for name, option in options]
            for name, _ in options:
                self.progress[name].state = "running"
            self._engine.start(works)
        return self._has_changed() or any(one.state == "running" for one in self.progress.values())

    def _forecast_if_due(self, entry: Entry) -> bool:
        """Write down the loss that is expected of an entry, unless it has begun before. If that fails, so has it."""
        if not entry.forecast_from or entry.name in self.forecasts or (self.folder / entry.name).exists():
            return True
        outcomes = {name: self.progress[name].outcome for name in entry.forecast_from}
        points = [
            Point(name, one.exaflops, one.metrics[METRIC])
            for name, one in outcomes.items()
            if one is not None and one.exaflops and METRIC in one.metrics
        ]
        try:
            planned = estimate(entry.name, entry.option(self.label_of(entry)).recipe)
            if planned.exaflops is None:
                raise RecipeError(f"no forecast: its compute is not known: {planned.problem}")
            self.forecasts[entry.name] = Forecast.of(entry.name, planned.exaflops, points)
            self._write(FORECASTS_FILE, forecasts_text(self.forecasts))
        except VitscaleError as error:
            progress = self.progress[entry.name]
            progress.state, progress.code, progress.why = "failed", error.exit_code, str(error)
            return False
        return True

    def _find_begun(self) -> None:
        """Take over what is done already, or started by an earlier process and still run by the engine.

        An entry that waits for a choice counts once that is made.
        """
        for entry in self.expansion.entries.values():  # each after those it depends on
            self.decide_choices()
            if self.label_of(entry) is not None:
                self._take_if_finished(entry)
        self.decide_choices()
        for name in self._engine.running:
            if name in self.progress and self.progress[name].state == "waiting":
                self.progress[name] = Progress("running")

    def _take_if_finished(self, entry: Entry) -> bool:
        outcome = read_outcome(self.folder / entry.name)
        if outcome is None:
            return False
        if not self._is_refused(entry):
            progress = self.progress[entry.name]
            progress.state, progress.outcome = "done", outcome
        return True

    def _is_refused(self, entry: Entry) -> bool:
        """Whether the entry's directory holds a run of another recipe, such as that of an earlier winner."""
        option, progress = entry.option(self.label_of(entry)), self.progress[entry.name]
        changed = changed_fields(self.folder / entry.name, option.recipe)
        if changed:
            progress.state, progress.code = "failed", EXIT_RECIPE
            progress.why = f"its directory holds a run of another recipe: {'; '.join(changed)}"
        return bool(changed)

    def _ready(self) -> Iterator[Entry]:
        """Entries that can be started, lower seeds first, else in the study's order; notes those that never can."""
        for entry in sorted(self.expansion.entries.values(), key=lambda one: one.seed or 0):
            progress = self.progress[entry.name]
            if progress.state != "waiting":
                continue
            if blocker := self._blocker(entry):
                progress.state, progress.why = "not run", blocker
            elif any(self.progress[before].state in ("waiting", "running") for before in entry.depends_on):
                continue
            elif self.label_of(entry) is not None and not self._take_if_finished(entry) and not self._is_refused(entry):
                yield entry

    def _blocker(self, entry: Entry) -> str:
        """Why an entry can never be run, in words; empty if it may."""
        of_choice = self.expansion.choices[entry.choice].entries if entry.choice is not None else ()
        for name in entry.depends_on:
            if self.progress[name].state == "not run":
                return f"{name} is not run"
            if self.progress[name].state == "failed" and not (name in of_choice and self.has_scored(name)):
                return f"{name} has failed"
        if entry.choice is not None and self.winners.get(entry.choice, "") is None:
            return f"every candidate of {entry.choice} has diverged"
        return ""

    def _note_end(self, name: str, code: int) -> None:
        progress = self.progress.get(name)
        if progress is None or progress.state != "running":
            return  # it was done when this process began, or belongs to a study that has changed since
        if code == EXIT_DONE:
            try:
                progress.outcome = read_outcome(self.folder / name)
            except VitscaleError as error:
                code, progress.why = error.exit_code, str(error)
        if code == EXIT_DONE and progress.outcome is not None:
            progress.state = "done"
            self.decide_choices()
            return
        if self._is_ending and code in (EXIT_PREEMPTED, EXIT_RETRY):  # a new launch dies of a signal
            progress.state = "waiting"
            return
        progress.state, progress.code = "failed", code or EXIT_RETRY
        progress.why = progress.why or last_words(self.folder / name / LOG_FILE)
        self.decide_choices()

    def _code(self) -> int:
        if all(one.state == "done" for one in self.progress.values()):
            return EXIT_DONE
        if self._is_ending:
            return EXIT_PREEMPTED
        codes = {one.code for one in self.progress.values() if one.state == "failed"}
        return next((code for code in _SEVERITY if code in codes), EXIT_BUG)

    def _has_changed(self) -> bool:
        """Whether there is anything new since the last call; if so, writes results.json."""
        known = [(one.state, one.code) for one in self.progress.values()], {**self.winners}
        if known == self._known:
            return False
        self._known = known
        with suppress(DataError):  # a full disk may have room again by the end
            self._write_results()
        return True

    def _write_results(self) -> None:
        self._write(RESULTS_FILE, results_text(self._about, self))

    def _write(self, name: str, content: str) -> None:
        with os_errors(f"{self.folder / name}: cannot be written"):
            write_text(self.folder / name, content)


def last_words(log: Path) -> str:
    """The error of a launch that has failed, if its log has one, else its last line."""
    lines: list[str] = []
    with suppress(OSError), FileIO(log, opener=regular) as file:
        file.seek(max(0, log.stat().st_size - _LOG_END_BYTES))
        lines = [line.strip() for line in file.readall().decode(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "")


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Keep the folder for this process. Raises `RecipeError` if another one has it."""
    with os_errors(f"{folder}: cannot be used", RecipeError):
        make_folder(folder)
        lock = LockFile(folder / _LOCK_FILE)
        is_free = try_lock(lock)
    with lock:
        if not is_free:
            raise RecipeError(f"{folder}: another process runs a study there; wait for it, or use another --dir")
        yield
