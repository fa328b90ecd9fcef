"""Shards -> batches: the order, the augmentation and the loader."""
