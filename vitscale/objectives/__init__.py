"""Objectives: what is learned, each a module around a backbone."""

from vitscale.objectives.build import build_objective, build_teacher, objective_class
from vitscale.objectives.objective import Agreed, Losses, Objective, Plan, Rows
