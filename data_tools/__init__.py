"""Converts image collections into datasets of shards; removes copies of test images; writes splits and subsets."""
