"""Shared by all commands: `-h`, `--version`, exit codes, closed pipes, Ctrl-C."""

import contextlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Annotated, Any, cast

import typer
from typer import BadParameter, Exit, Option, Typer

from vitscale.ground.errors import EXIT_DONE, EXIT_INTERRUPTED, DataError, RecipeError, VitscaleError
from vitscale.ground.files.durable import forbid_writing_by_everybody
from vitscale.ground.machine import share_cores
from vitscale.ground.safe_text import indented, protect_output, shown

HELP = {"help_option_names": ["-h", "--help"]}  # a command's settings, which its subcommands inherit

_UsageError: Any = BadParameter.__base__  # of the click that typer brings, or of click itself
_TYPES = {"int": "N", "float": "NUMBER", "str": "TEXT", "path": "PATH"}


def _show_versions(is_asked: bool) -> None:
    if is_asked:
        show_versions(as_json=False)
        raise Exit(EXIT_DONE)


Version = Annotated[
    bool,
    Option("--version", callback=_show_versions, is_eager=True, help="Print the versions in use; with --json as JSON."),
]


def show_versions(*, as_json: bool) -> None:
    """Print the versions that a result depends on, one per line or as one JSON object."""
    from vitscale.ground.versions import versions

    found = versions()
    if as_json:
        print(json.dumps(found))
        return
    for name, version in found.items():
        print(f"{name:<{max(map(len, found))}}  {version}")


def run(app: Typer) -> None:
    """Run a command with this process's arguments, and end the process.

    An error that a person can fix ends with one line and the exit code of its `VitscaleError`, a bug with its trace and
    1, Ctrl-C with 130. If standard output cannot be written, as on a full disk, it is one line and the code of
    `DataError`. A reader that has seen enough (`| head -1`) is not an error: the rest is dropped, and the command ends
    with its own code.
    """
    # A shell makes its background processes ignore Ctrl-C.
    is_ctrl_c_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    if not is_ctrl_c_ignored:
        signal.signal(signal.SIGINT, interrupt)
    forbid_writing_by_everybody()
    share_cores()
    output = _open_output()
    protect_output()
    code: Any = EXIT_DONE
    try:
        try:
            code = _call(app)
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
    except VitscaleError as error:
        code = error.exit_code
        _complain(str(error))
    except UnicodeEncodeError as error:  # from a file's name: printed text is escaped
        code = RecipeError.exit_code
        _complain(
            f"{error.object!a}: a name that is not UTF-8, or not to be had in this locale; LC_ALL=C.UTF-8 has all"
        )
    except OSError as error:
        if error is not output.error:
            raise
        code = DataError.exit_code
        _complain(f"the output cannot be written: {error.strerror}")
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Exception:
        if not interrupts:
            raise
        code = EXIT_INTERRUPTED  # Python's imports can turn Ctrl-C into other errors
    with contextlib.suppress(OSError):
        sys.stdout.flush()  # what was printed before the error
    if not is_ctrl_c_ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while Python exits, Ctrl-C would only print a trace
    if isinstance(code, int) and "LOCAL_RANK" in os.environ:
        os._exit(code)  # one of several ranks: threads of gloo may abort it on its way out of the interpreter
    sys.exit(code)


def reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more: a command that prints forever should then end."""
    file = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(file, _File) and file.is_dropped


def _call(app: Typer) -> int:
    if sorted(sys.argv[1:]) == ["--json", "--version"]:
        show_versions(as_json=True)
        return EXIT_DONE
    try:
        return readable_command(app)(standalone_mode=False) or EXIT_DONE
    except _UsageError as error:
        error.message = shown(_in_our_words(error.message))
        error.show()
        return error.exit_code


def _in_our_words(message: str) -> str:
    """Reword pydantic's messages, which typer passes on: "Input should be a valid integer, unable to parse ..."."""
    message = message.removeprefix("Value error, ")
    if choice := re.fullmatch(r"(.*) is not one of (.*)\.", message):
        return f"expected one of {choice[2]}; found {choice[1]}"
    if message.startswith("Input should be "):
        message = f"expected {message.removeprefix('Input should be ').partition(', unable')[0]}"
    return message.replace("a valid integer", "an integer").replace("a valid number", "a number")


def _complain(message: str) -> None:
    with contextlib.suppress(OSError):
        if sys.stderr is not None:
            sys.stderr.write(f"error: {indented(message)}\n")
            sys.stderr.flush()


def readable_command(app: Typer) -> Any:
    """An app's command, with N, NUMBER, TEXT and PATH in its help instead of <int range>, <list[str]> and so on."""
    command = typer.main.get_command(app)
    _name_types(command)
    return command


def _name_types(command: Any) -> None:
    for below in getattr(command, "commands", {}).values():
        _name_types(below)
    for param in command.params:
        if hasattr(param, "display_type"):  # since typer 0.27; before that the names were click's
            param.display_type = partial(_type_name, param.display_type, param.param_type_name == "argument")


def _type_name(display_type: Callable[[Any], str], is_argument: bool, ctx: Any) -> str:
    shown = display_type(ctx)
    kind = shown.strip("<>").removeprefix("list[").removesuffix("]").removesuffix(" range").lower()
    if kind not in _TYPES:
        return shown
    return "" if is_argument else _TYPES[kind]  # an argument's name says enough


class _File(io.FileIO):
    """Standard output as a file that drops what nobody reads any more, and everything after a failed write."""

    is_dropped = False
    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write data, or drop it if the pipe's reader is gone. Other OSErrors are kept in `error` and raised."""
        try:
            return super().write(data)
        except BrokenPipeError:
            self._drop()
            return memoryview(data).nbytes
        except OSError as error:
            self.error = error
            self._drop()  # buffered data would fail again at the end
            raise

    def _drop(self) -> None:
        self.is_dropped = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


def _open_output() -> _File:
    """Replace sys.stdout by one that drops what nobody reads, and escapes what its encoding lacks, as `\\u732b`."""
    if sys.stdout is None:  # closed; keep its number from other files, and fail writes as on a full disk
        os.dup2(os.open(os.devnull, os.O_RDONLY), 1)
        file = _File(1, "w", closefd=False)
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(file), "utf-8", "backslashreplace")
        return file
    before = cast(io.TextIOWrapper, sys.stdout)
    file = _File(before.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(file),
        before.encoding,
        "backslashreplace",  # as Python does for standard error
        line_buffering=before.line_buffering or before.write_through,
    )
    return file
