"""Optimizers, their groups of parameters and rates, and what an update of each should be."""
