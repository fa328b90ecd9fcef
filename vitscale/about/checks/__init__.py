"""Proves a recipe's updates: runs its engine step by step beside a computation in plain torch."""
