"""`vitscale shards` in this process."""

from typer.testing import CliRunner

from vitscale.cli.main import app


def run(*arguments):
    """Exit code and what was printed; errors for people are raised."""
    result = CliRunner().invoke(app, ["shards", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout
