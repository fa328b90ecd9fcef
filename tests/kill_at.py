"""A conversion that is killed right after something has just come into being; shared by the tests of survival."""

import subprocess
import sys

# Kills itself at the given rename: each is followed by a flush of the folder. Prints how many there were.
_SCRIPT = """
import os, signal, sys
import vitscale.ground.files.durable as durable
calls, sync = 0, durable.sync
def counted(folder):
    global calls
    calls += 1
    if calls == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    sync(folder)
durable.sync = counted
if __name__ == "__main__":
    from data_tools.conversion import convert
    from data_tools.machine import Machine
    from data_tools.dedup.against import name_indexes
    from data_tools.request import Request
    request = Request(sys.argv[2], shard_samples=int(sys.argv[4]), dedup=name_indexes(sys.argv[5:]))
    convert(request, sys.argv[3], Machine(workers=1, max_reject_rate=0.2))
    print(calls)
"""


def convert_killed_at(
    rename: int, src: object, out: object, shard_samples: int, *indexes: object
) -> subprocess.CompletedProcess[str]:
    """Convert with one worker in a process of its own, which dies at its `rename`th rename; 0 for never.

    What it prints is the number of renames.
    """
    arguments = map(str, (rename, src, out, shard_samples, *indexes))
    return subprocess.run([sys.executable, "-c", _SCRIPT, *arguments], capture_output=True, text=True, timeout=120)
