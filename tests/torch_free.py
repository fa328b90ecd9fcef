"""Commands as processes that tell whether torch, numba or matplotlib was imported."""


def command(name: str) -> str:
    """Python code: what a function of `vitscale.cli.entry` does, and a word on stderr where one of these came along."""
    return f"""
import sys
from vitscale.cli.entry import {name}
try:
    {name}()
finally:
    for heavy in sys.modules.keys() & ("torch", "numba", "matplotlib"):
        print(heavy, "was imported", file=sys.stderr)
"""
