"""Starts attempt after attempt until a run is done, is told to end, or makes no more progress."""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from vitscale.ground.errors import EXIT_DONE, PeerLostError, VitscaleError, turned
from vitscale.ground.wording import counted
from vitscale.launch.ends import EXIT_PREEMPTED, EXIT_RETRY, FINAL, End, cause
from vitscale.launch.nodes import Account, Decision, OneNode
from vitscale.launch.rank import RankCommand
from vitscale.launch.several_nodes import FirstNode, OtherNode
from vitscale.launch.supervisor import Supervisor, say
from vitscale.runs.checkpoint_index import newest_checkpoint_step
from vitscale.runs.done import read_done
from vitscale.runs.launches import Journal
from vitscale.runs.names import DONE_FILE, LAUNCH_FILE

Nodes = OneNode | FirstNode | OtherNode
_LONGEST_PAUSE_SECONDS = 60.0
_LATE_SECONDS = 5.0  # a network file system may show late what another machine has written


class Launch:
    """One run on this machine, or this machine's part of one.

    Args:
        run_dir: the run's directory; DONE in it marks the run as finished.
        prepare: the number of an attempt, from 0 -> its ranks. Raises `VitscaleError` if there is nothing to start.
        nodes: the other nodes of this launch, which do the same at the same time.
        max_restarts: how often in a row to restart without a new checkpoint in between.
        stops_early: whether the ranks are to end with 0 before the run is done.
        first_pause_s: seconds before a restart; doubled for each further one in a row, up to a minute.
    """

    def __init__(
        self,
        run_dir: Path,
        prepare: Callable[[int], Sequence[RankCommand]],
        supervisor: Supervisor,
        nodes: Nodes | None = None,
        *,
        max_restarts: int = 3,
        stops_early: bool = False,
        first_pause_s: float = 1.0,
    ) -> None:
        self._run_dir, self._prepare, self._supervisor = run_dir, prepare, supervisor
        self._nodes = nodes or OneNode(None)
        self._max_restarts, self._stops_early, self._first_pause = max_restarts, stops_early, first_pause_s
        self._journal = Journal(run_dir / LAUNCH_FILE, say)
        self._was_done, self._furthest, self._in_a_row, self._why = self._is_done(), self._progress(), 0, ""
        self._last_early: tuple[int, str] | None = None

    def run(self) -> int:
        """Make attempts until one is the last. Returns the exit code of the launch. Raises what `prepare` raises."""
        began = time.monotonic()
        self._supervisor.exchange = self._exchange
        try:
            while (decision := self._attempt()).restarts:
                self._in_a_row, step = decision.in_a_row, self._supervisor.highest_step
                say(
                    f"restart in {decision.pause_s:g} s, number {self._in_a_row} of at most {self._max_restarts} "
                    f"without a new checkpoint. Cause: {decision.why}"
                )
                self._journal.write("restart", step=step, cause=decision.why, pause_s=decision.pause_s)
                self._supervisor.wait(decision.pause_s)
        except VitscaleError as error:
            error.exit_code = self._believed(error.exit_code)
            self._journal.write("finished", exit_code=error.exit_code, cause=str(error))
            self._nodes.leave(error.exit_code, str(error))
            raise
        code = self._believed(decision.code)
        why = f"{decision.why}: {self._why}" if self._why else decision.why
        self._journal.write("finished", exit_code=code, cause=why, step=self._supervisor.highest_step)
        seconds, attempts = time.monotonic() - began, self._journal.attempt
        say(f"exit code {code} after {seconds:,.0f} s and {counted(attempts, 'attempt')}: {decision.why}")
        return code

    def _believed(self, code: int) -> int:
        """An exit code that may be another node's; 0 only if this node, too, sees that the run is done."""
        until = time.monotonic() + _LATE_SECONDS
        while code == EXIT_DONE and not (self._stops_early or self._is_done()):
            if time.monotonic() > until:
                say(f"another node says that the run is done, but there is no {self._run_dir / DONE_FILE}")
                return EXIT_RETRY
            time.sleep(0.1)
            with suppress(OSError):
                any(self._run_dir.iterdir())  # makes a network file system ask its server, not its cache
        return code

    def _attempt(self) -> Decision:
        ranks = self._prepare(self._journal.attempt)
        if self._supervisor.told is not None:
            why = f"told to end by {self._supervisor.told.name} while no rank was running"
            self._nodes.leave(EXIT_PREEMPTED, why)
            return Decision(EXIT_PREEMPTED, why, restarts=False)
        self._journal.attempt += 1
        world_size = int(ranks[0].environment.get("WORLD_SIZE", len(ranks)))
        self._journal.write("started", world_size=world_size, checkpoint=newest_checkpoint_step(self._run_dir))
        with turned("a rank cannot be started", PeerLostError, OSError):
            ends = self._supervisor.run(ranks)
        for end in ends:
            fields: dict[str, object] = {"step": end.step, "rank": end.rank, "pid": end.pid}
            fields |= {"returncode": end.returncode, "what": end.describe()} | ({"why": end.why} if end.why else {})
            self._journal.write("rank ended", world_size=world_size, **fields)
        decision = self._nodes.conclude(self._account(ends), self._decide)
        culprit = cause(ends) or min(ends, key=lambda end: end.rank, default=None)
        is_from_here = culprit is not None and decision.why in (culprit.describe(), "told to end")
        self._why = culprit.why if culprit is not None and is_from_here else ""
        return decision

    def _exchange(self, trouble: str) -> str:
        self._journal.flush()  # also if this process is killed, its start is on record
        return self._nodes.exchange(trouble)

    def _account(self, ends: Sequence[End]) -> Account:
        """What became of the ranks of this node."""
        culprit = cause(ends)
        is_done = self._is_done() and not (self._was_done and culprit)
        if is_done and culprit:
            say(f"the run is done anyway: {self._run_dir / DONE_FILE} was written earlier")
        all_ended_well = bool(ends) and all(end.is_done for end in ends)
        told = self._supervisor.told.name if self._supervisor.told else ""
        return Account(culprit, is_done, all_ended_well, told, self._supervisor.unkillable)

    def _decide(self, accounts: Sequence[Account]) -> Decision:
        """What follows from the accounts of all nodes."""
        code, may_restart, why = self._judge(accounts)
        if self._progress() > self._furthest:
            self._furthest, self._in_a_row = self._progress(), 0
        if may_restart and self._in_a_row >= self._max_restarts:
            say(f"not restarted: the last {counted(self._in_a_row, 'restart')} brought no new checkpoint")
            may_restart = False
        early = _early_failure(accounts)
        if may_restart and early is not None and early == self._last_early:
            say("not restarted: it failed before its first heartbeat, in the same way as the attempt before")
            may_restart = False
        self._last_early = early
        if not may_restart:
            return Decision(code, why, restarts=False)
        pause = min(_LONGEST_PAUSE_SECONDS, self._first_pause * 2 ** min(self._in_a_row, 10))
        return Decision(code, why, restarts=True, in_a_row=self._in_a_row + 1, pause_s=pause)

    def _judge(self, accounts: Sequence[Account]) -> tuple[int, bool, str]:
        """(exit code, whether to try again instead, why)."""
        if accounts[0].is_done:  # this node's own: rank 0, which writes DONE, is on node 0
            return EXIT_DONE, False, "done"
        if any(account.unkillable for account in accounts):
            return EXIT_RETRY, False, "a rank does not die of SIGKILL"
        told = next((account.told for account in accounts if account.told), "")
        lost = next((account.lost for account in accounts if account.lost), "")
        culprit = cause([account.culprit for account in accounts if account.culprit])
        if lost and (culprit is None or culprit.is_consequence):
            return EXIT_RETRY, not told, lost
        if culprit is not None:
            return culprit.code, culprit.code not in FINAL and not told, culprit.describe()
        if all(account.all_ended_well for account in accounts):
            if self._stops_early:
                return EXIT_DONE, False, "stopped early, as asked"
            say(f"all ranks ended with exit code 0, but there is no {self._run_dir / DONE_FILE}")
            return EXIT_RETRY, not told, "all ranks ended with 0 before the run was done"
        return EXIT_PREEMPTED, False, f"told to end by {told}" if told else "told to end"

    def _is_done(self) -> bool:
        return read_done(self._run_dir) is not None

    def _progress(self) -> tuple[int, int]:
        """How far the run has come for good. Checkpoints elsewhere cannot be seen; for those the steps taken count."""
        saved = newest_checkpoint_step(self._run_dir)
        return saved, 0 if saved else self._supervisor.highest_step


def _early_failure(accounts: Sequence[Account]) -> tuple[int, str] | None:
    """How an attempt failed before any heartbeat: exit code and message.

    None for what may be otherwise next time: a kill for memory, a lost rank, storage that does not answer.
    """
    culprit = cause([account.culprit for account in accounts if account.culprit])
    if culprit is None or culprit.step is not None or culprit.is_consequence or culprit.returncode == -signal.SIGKILL:
        return None
    return culprit.returncode, culprit.why
