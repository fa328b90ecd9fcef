"""Files as processes share them: complete or absent, locked, digested, fetched, and in folders of one machine.

Nothing here knows what is in a file. No torch and no numba: what only looks at a run or a dataset starts at once.
"""
