"""Proves a recipe's updates: the engine that it trains with, step by step beside a computation in plain torch."""
