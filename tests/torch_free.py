"""Commands as processes that tell whether torch was imported."""


def command(module: str) -> str:
    """Python code: what the entry point `main` of a module does, and a word on stderr where torch came along."""
    return f"""
import sys
from {module} import main
try:
    main()
finally:
    if "torch" in sys.modules:
        print("torch was imported", file=sys.stderr)
"""
