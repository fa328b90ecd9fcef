"""Starting the ranks of a run, watching them, and starting them again. No torch."""

from vitscale.launch.machine import count_devices
from vitscale.launch.pretraining import Pretraining, PretrainingRanks, launch_pretraining
from vitscale.launch.rank import HEARTBEAT_VARIABLE, RankCommand
from vitscale.launch.restarts import Launch
from vitscale.launch.supervisor import Supervisor

__all__ = [
    "HEARTBEAT_VARIABLE",
    "Launch",
    "Pretraining",
    "PretrainingRanks",
    "RankCommand",
    "Supervisor",
    "count_devices",
    "launch_pretraining",
]
