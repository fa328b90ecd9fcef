"""Files that processes share: written completely or not at all, locks, digests, fetching, folders of one machine.

Nothing here knows what is in a file. It imports no torch, so commands that only look at a run or a dataset
start at once.
"""
