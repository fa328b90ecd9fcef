"""Checks of runs: proofs of a recipe's updates in plain torch, and what a run did, computed again from its files."""
