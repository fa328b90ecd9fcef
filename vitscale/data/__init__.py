"""Shards -> batches: the order, the augmentation and the loader. Used by training, evaluation and commands."""
