"""Failures on paper: the share of a run's time that is useful, how often to save, what spare nodes are worth.

Nodes fail independently and at a constant rate, so that the time between two failures of any of them is exponential. A
failure takes away what was computed since the last complete checkpoint began, and the time of a restart, in which nodes
may fail again. This is the model of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps" (2006), here with checkpoints that are written while training goes on.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.wording import counted

RESTART_S = 120.0
REPAIR_HOURS = 1.0
_NEWTON_STEPS = 30


@dataclass(frozen=True)
class Saving:
    """What a checkpoint takes, in seconds.

    Attributes:
        stall: for which training waits.
        write: from its beginning until it is complete; another one cannot begin before.
    """

    stall: float
    write: float


@dataclass(frozen=True)
class Failures:
    """How nodes fail and come back, in seconds.

    Attributes:
        nodes: that compute.
        mtbf: mean time between two failures of one node.
        restart: from a failure to the next step that is computed, the checkpoint being read and enough nodes there.
        repair: until a failed node can be used again, on average.
        assumptions: in words, what nobody has said.
    """

    nodes: int
    mtbf: float
    restart: float
    repair: float
    assumptions: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Failures a second, of all nodes."""
        return self.nodes / self.mtbf

    def useful(self, every: float, saving: Saving, spares: int = 0) -> float:
        """The share of the time that brings a run forward, from 0 to 1.

        Args:
            every: seconds of training between the begins of two checkpoints.
            spares: nodes beside those that compute.

        A run that is `every` seconds further has taken, on average,
        exp(rate (restart + write)) (exp(rate (every + stall)) - 1) / rate. What is lost with a checkpoint that was not
        complete counts as a longer restart: the run is where it was as long after the begin of the last complete one.
        """
        lost, span = self.rate * (self.restart + saving.write), self.rate * (every + saving.stall)
        if lost + span > math.log(1e300):
            return 0.0
        return self.rate * every / (math.exp(lost) * math.expm1(span)) * (1 - self.waiting(spares))

    def best_interval(self, saving: Saving) -> float:
        """The seconds between the begins of two checkpoints with the largest useful share.

        With x = rate * interval it solves 1 - x = exp(-x - rate * stall); for rare failures that is Young's
        sqrt(2 stall / rate). No interval is shorter than a checkpoint takes to be written.
        """
        scaled = self.rate * saving.stall
        x = min(1.0, math.sqrt(2 * scaled))
        for _ in range(_NEWTON_STEPS):
            slope = -math.expm1(-x - scaled)
            if slope == 0:  # nothing is lost with a checkpoint
                break
            x += 1 - x / slope
        return max(x / self.rate, saving.write)

    def waiting(self, spares: int) -> float:
        """The share of the time in which more nodes are being repaired than there are spares, so that nothing runs.

        The nodes in repair are a birth-death process: failures come while no more than `spares` are in it. So the share
        is Erlang's loss formula for spares + 1 servers, whatever the distribution of repairs.
        """
        load = self.rate * self.repair
        blocked = 1.0
        for servers in range(1, spares + 2):
            blocked = load * blocked / (servers + load * blocked)
        return blocked


def make_failures(
    nodes: int,
    mtbf: float,
    restart: float | None = None,
    repair: float | None = None,
    restarts: Sequence[float] = (),
) -> Failures:
    """The failures of so many nodes, with what is assumed where a figure is None.

    Args:
        mtbf: hours between two failures of one node.
        restart: seconds from a failure to the next step.
        restarts: the same, as measured: their median counts where `restart` is None.
        repair: hours until a failed node can be used again.
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
