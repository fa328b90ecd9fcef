"""Starts the ranks of a run, watches them and starts them again. Needs no torch."""

from vitscale.ground.machine import count_devices
from vitscale.launch.environment import RankEnvironment, find_place, read_environment
from vitscale.launch.first_node import FirstNode
from vitscale.launch.nodes import Layout, Nodes, ThisNode, fitting
from vitscale.launch.other_node import OtherNode
from vitscale.launch.pretraining import Pretraining, PretrainingRanks, launch_pretraining
from vitscale.launch.rank import RankCommand
from vitscale.launch.restarts import Launch
from vitscale.launch.supervisor import Supervisor

__all__ = [
    "FirstNode",
    "Launch",
    "Layout",
    "Nodes",
    "OtherNode",
    "Pretraining",
    "PretrainingRanks",
    "RankCommand",
    "RankEnvironment",
    "Supervisor",
    "ThisNode",
    "count_devices",
    "find_place",
    "fitting",
    "launch_pretraining",
    "read_environment",
]
