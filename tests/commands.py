"""Commands in this process, as people type them: the processes' own work is tested in test_every_command.py."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from typer.testing import CliRunner

from vitscale.cli.main import app as vitscale_app
from vitscale.ground.errors import VitscaleError


class Ended(NamedTuple):
    """A command's exit code, what it printed, and the message of its error."""

    returncode: int
    stdout: str
    stderr: str
    message: str = ""

    @property
    def answer(self) -> tuple[int, str]:
        """The exit code, and the message of the error or else what was printed."""
        return self.returncode, self.message or self.stdout


def command(*arguments: object, app: Any = vitscale_app) -> Ended:
    """Run a command of `vitscale` or of another app. Any error that is not one for people fails the test."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, VitscaleError):
        message = str(result.exception)
        return Ended(result.exception.exit_code, result.stdout, f"{result.stderr}error: {message}\n", message)
    assert isinstance(result.exception, SystemExit | None), result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def run(*arguments: object, app: Any = vitscale_app) -> tuple[int, str]:
    """Exit code and what was printed; errors for people are raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def on_processes(processes: int, *commands: Sequence[object]) -> list[str]:
    """Standard output of several commands of `vitscale`, each by a `torchrun` of its own, whose group it leaves."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    printed = []
    for arguments in commands:
        words = [*launcher, "-m", "vitscale", *(str(word) for word in arguments)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    return printed
