"""A model of failures: the useful share of a run's time, how often to save, and what spare nodes are worth.

Nodes fail independently and at a constant rate, so the time between two failures of any of them is exponential. A
failure costs what was computed since the last complete checkpoint began, and the time of a restart, during which nodes
may fail again. This is the model of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps" (2006), here with checkpoints that are written while training continues.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.ground.wording import counted

RESTART_S = 120.0
REPAIR_HOURS = 1.0
_NEWTON_STEPS = 30


@dataclass(frozen=True)
class Saving:
    """The time that a checkpoint takes, in seconds."""

    stall: float  # how long training waits for it
    write: float  # from its beginning until it is complete; the next one cannot begin earlier


@dataclass(frozen=True)
class Failures:
    """How nodes fail and come back; times in seconds."""

    nodes: int  # that compute
    mtbf: float  # the mean time between two failures of one node
    restart: float  # from a failure to the next computed step, including reading the checkpoint, if nodes are available
    repair: float  # the mean time until a failed node can be used again
    assumptions: tuple[str, ...] = ()  # what was assumed because it was not given, in words

    @property
    def rate(self) -> float:
        """Failures per second, of all nodes together."""
        return self.nodes / self.mtbf

    def useful(self, every: float, saving: Saving, spares: int = 0) -> float:
        """The share of the time that advances a run, from 0 to 1.

        `every` is the seconds of training between the beginnings of two checkpoints, `spares` the number of nodes
        besides those that compute.

        To advance by `every` seconds of training a run takes, on average,
        exp(rate (restart + write)) (exp(rate (every + stall)) - 1) / rate. A failure takes the run back to the
        beginning of the last complete checkpoint, `write` seconds before that was complete; repeating these seconds
        counts as part of the restart.
        """
        lost, span = self.rate * (self.restart + saving.write), self.rate * (every + saving.stall)
        if lost + span > math.log(1e300):
            return 0.0
        return self.rate * every / (math.exp(lost) * math.expm1(span)) * (1 - self.waiting(spares))

    def best_interval(self, saving: Saving) -> float:
        """The seconds between the beginnings of two checkpoints that give the largest useful share.

        With x = rate * interval it solves 1 - x = exp(-x - rate * stall); for rare failures that is Young's
        sqrt(2 stall / rate). No interval is shorter than a checkpoint takes to be written.
        """
        scaled = self.rate * saving.stall
        x = min(1.0, math.sqrt(2 * scaled))
        for _ in range(_NEWTON_STEPS):
            slope = -math.expm1(-x - scaled)
            if slope == 0:  # a checkpoint costs nothing
                break
            x += 1 - x / slope
        return max(x / self.rate, saving.write)

    def waiting(self, spares: int) -> float:
        """The share of the time during which more than `spares` nodes are in repair, so that nothing runs.

        The number of nodes in repair is a birth-death process: nodes fail only while at most `spares` are in repair. So
        the share follows Erlang's loss formula for spares + 1 servers, whatever the distribution of repair times.
        """
        load = self.rate * self.repair
        blocked = 1.0
        for servers in range(1, spares + 2):
            blocked = load * blocked / (servers + load * blocked)
        return blocked


def make_failures(
    nodes: int, mtbf: float, restart: float | None = None, repair: float | None = None, restarts: Sequence[float] = ()
) -> Failures:
    """The failures of `nodes` nodes, with assumptions for figures that are None.

    `mtbf` and `repair` are in hours, `restart` in seconds; if that is None, it is the median of the measured
    `restarts`.
    """
    assumed = ["nodes fail independently, at a constant rate, and every failure takes its node away"]
    if restart is None and restarts:
        restart = statistics.median(restarts)
        of = f"{counted(len(restarts), 'restart')} ({min(restarts):.3g} to {max(restarts):.3g} s)"
        assumed.append(f"{restart:.3g} s from a failure to the next step, the median of {of}")
    elif restart is None:
        restart = RESTART_S
        assumed.append(f"{restart:g} s from a failure to the next step (--restart)")
    if repair is None:
        repair = REPAIR_HOURS
        assumed.append(f"{repair:g} h until a failed node can be used again (--repair)")
    return Failures(nodes, mtbf * 3600, restart, repair * 3600, tuple(assumed))
