"""Starts the ranks of a run, watches them and starts them again. Needs no torch."""

from vitscale.ground.machine import count_devices
from vitscale.launch.environment import find_place, read_environment
from vitscale.launch.nodes import ThisNode, fitting
from vitscale.launch.pretraining import Pretraining, PretrainingRanks
from vitscale.launch.rank import RankCommand
from vitscale.launch.restarts import Launch
from vitscale.launch.several_nodes import FirstNode, OtherNode
from vitscale.launch.supervisor import Supervisor
