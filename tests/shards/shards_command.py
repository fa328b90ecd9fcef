"""`vitscale shards` in this process."""

from functools import partial

import commands

run = partial(commands.run, "shards")
