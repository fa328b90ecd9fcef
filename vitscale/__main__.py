"""`python -m vitscale` is the `vitscale` command, for where only the interpreter's path is known."""

from vitscale.cli.entry import vitscale

vitscale()
