"""`python -m vitscale`: the `vitscale` command where only the interpreter's path is known."""

from vitscale.cli.entry import vitscale

vitscale()
