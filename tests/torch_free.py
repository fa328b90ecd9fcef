"""Commands as processes that tell whether torch was imported."""


def command(name: str) -> str:
    """Python code: what a function of `vitscale.cli.entry` does, and a word on stderr where torch came along."""
    return f"""
import sys
from vitscale.cli.entry import {name}
try:
    {name}()
finally:
    if "torch" in sys.modules:
        print("torch was imported", file=sys.stderr)
"""
