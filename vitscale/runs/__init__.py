"""The files of a run directory, with one reader and one writer for each.

Nothing here imports torch, so that commands that only look at a run start at once.
"""
