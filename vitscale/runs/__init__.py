"""What lies in a run directory: the one reader and the one writer of each of its files.

No torch, so that what only looks at a run starts at once.
"""
