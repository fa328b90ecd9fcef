"""Commands in this process, as people type them: the processes' own work is tested in test_every_command.py."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, NamedTuple

from typer.testing import CliRunner

from vitscale.cli.command_line import readable_command
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


def on_processes(processes: int, *commands: Sequence[object]) -> list[str]:
    """Standard output of several commands of `vitscale`, one after the other in one `accelerate launch`."""
    # Known fault: for --cpu the accelerate of constraints.txt starts one process; --multi_gpu starts all, on CPUs too.
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(processes)]
    launcher += ["--num_machines", "1", "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    words = json.dumps([[str(word) for word in arguments] for arguments in commands])
    done = subprocess.run(
        [*launcher, __file__, words],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(printed) == len(commands)  # one process prints for all
    return printed


if __name__ == "__main__":
    for arguments in json.loads(sys.argv[1]):
        with redirect_stdout(StringIO()) as printed:
            readable_command(vitscale_app)(arguments, standalone_mode=False)
        if printed.getvalue():
            print(json.dumps(printed.getvalue()), flush=True)
