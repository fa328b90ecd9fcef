"""What all commands have in common, as people type them: names, help, versions, output that nobody takes, Ctrl-C."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import fsspec
import pytest
import torch_free
from commands import command
from pictures import encoded, make_picture
from small_files import edit_manifest

import vitscale
from vitscale.cli.command_line import readable_command
from vitscale.cli.convert import app as convert_app
from vitscale.cli.flops import app as flops_app
from vitscale.cli.main import COMMANDS
from vitscale.cli.main import app as vitscale_app
from vitscale.data.shards.generated import write_generated_dataset


def entry(command: str, *arguments: object) -> list[str]:
    """What an installed script does; `vitscale-convert` is `convert` here."""
    function = command.removeprefix("vitscale-")
    argv = [command, *map(str, arguments)]
    return [sys.executable, "-c", f"import sys; sys.argv = {argv}; from vitscale.cli.entry import {function} as f; f()"]


def run(command: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "80"} | variables
    result = subprocess.run(entry(command, *arguments), capture_output=True, text=True, env=environment, check=False)
    assert "Traceback" not in result.stderr, result.stderr
    return result


def help_of(monkeypatch, *arguments: str) -> str:
    """What `-h` prints at 80 columns, in this process; `--help` prints the same."""
    monkeypatch.setenv("COLUMNS", "80")
    said = []
    for option in ("-h", "--help"):
        with redirect_stdout(StringIO()) as printed, suppress(SystemExit):
            readable_command(vitscale_app)([*arguments, option], "vitscale", standalone_mode=False)
        said.append(printed.getvalue())
    assert said[0] == said[1]
    return said[0]


@pytest.mark.parametrize("group", [[], ["shards"], ["dedup"], ["study"]])
def test_a_list_of_commands_says_whole_sentences_at_80_columns(monkeypatch, group):
    listed = help_of(monkeypatch, *group).partition("Commands:\n")[2].splitlines()
    assert len(listed) >= 2
    assert all(len(line) <= 80 and not line.endswith("...") for line in listed), listed


@pytest.mark.parametrize("name", [*COMMANDS, "shards verify", "vtab prepare"])
def test_help_has_words_for_types(monkeypatch, name):
    help_text = help_of(monkeypatch, *name.split())
    assert "--help" in help_text and not re.search(r"<(int|float|str|[Pp]ath|list\[)", help_text), help_text


def test_help_is_that_of_the_process(monkeypatch):
    result = run("vitscale", "shards", "-h")
    assert result.returncode == 0 and result.stdout == help_of(monkeypatch, "shards")


def test_the_other_commands_are_found_below_the_first(tmp_path):
    assert command("flops", "b16_jft") == command("b16_jft", app=flops_app)
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.jpg").write_bytes(encoded(make_picture(ord(name), 40, 40)))
    urls = [f"memory://every-command/{number}" for number in range(2)]
    assert command("convert", tmp_path / "images", urls[0]).returncode == 0
    assert command(tmp_path / "images", urls[1], app=convert_app).returncode == 0
    shards = [fsspec.filesystem("memory").cat(f"{url}/shard-00000.beton") for url in urls]
    assert shards[0] == shards[1]
    launch, train = (command(name, "h14_jft", "--dry-run", "--ranks", 2) for name in ("launch", "train"))
    assert launch.returncode == 0 and launch.stdout == train.stdout


@pytest.mark.parametrize(
    "line",
    [
        *("vitscale --version", "vitscale dedup --help", "vitscale recipe h14_jft", "vitscale models"),
        "vitscale-flops --breakdown b16_jft",
        *("vitscale-flops --hardware h200 --devices 8 --mfu 0.4 b16_jft", "vitscale-flops --budget 500 b16_jft"),
    ],
)
def test_what_needs_no_torch_starts_without_it(line):
    program, *words = line.split()
    started = [sys.executable, "-c", torch_free.command(program.removeprefix("vitscale-")), *words]
    result = subprocess.run(started, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout and "was imported" not in result.stderr, result.stderr


@pytest.mark.parametrize("command", ["vitscale", "vitscale-convert", "vitscale-flops"])
def test_versions_are_those_of_the_packages(command):
    found = json.loads(run(command, "--version", "--json").stdout)
    assert all(found[package] == importlib.metadata.version(package) for package in ("torch", "deepspeed", "ffcv"))
    lines = [line.split() for line in run(command, "--version").stdout.splitlines()]
    assert dict(lines) == found and "vitscale" in found


def test_versions_say_what_is_absent(tmp_path):
    """A checkout with nothing compiled in it, under an interpreter that sees none of the installed packages."""
    shadow = tmp_path / "vitscale"
    (shadow / "ground" / "native").mkdir(parents=True)
    ground = ("__init__.py", "errors.py", "safe_text.py", "native/__init__.py", "versions.py")
    for name in ("__init__.py", *(f"ground/{name}" for name in ground)):
        (shadow / name).symlink_to(Path(vitscale.__file__).parent / name)
    command = [sys.executable, "-S", "-c", "from vitscale.ground.versions import versions; print(versions())"]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=True)
    assert "'ffcv': 'not installed', 'libjpeg_turbo': 'cannot be loaded'" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("vitscale co", "convert"),
        ("vitscale convert --shuf", "--shuffle-seed"),
        ("vitscale launch --resume n", "never"),
    ],
)
def test_a_shell_completes_commands_options_and_choices(words, expected):
    position = str(len(words.split()) - 1)
    result = run("vitscale", _VITSCALE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=position)
    assert result.stdout.split() == [expected], result.stderr


MISTAKES = [
    ("export x --format onnx --out y", ["--format", "'onnx'", "safetensors"]),
    ("models --image-size 9x", ["--image-size", "expected an integer"]),
    ("plan h14_jft --devices 0 --hardware h100", ["--devices", "expected", "1"]),
    ("laucnh", ["'laucnh'", "'launch'"]),
    ("launch x --smok", ["--smok", "--smoke"]),
    ("launch", ["recipe"]),
    ("recipe --explain data.stal_s", ["'data.stal_s'", "'data.stall_s'"]),
    ("recipe --schema --explain", ["--schema"]),
    ("recipe --diff h14_jft", ["--diff"]),
    ("recipe h14_jft l16_jft", ["--diff"]),
    ("recipe h14_jft data.flip seed --explain", ["3", "--explain"]),
]


def test_a_mistake_in_an_argument_is_told_in_our_words(tmp_path):
    """In processes of one that has imported everything."""
    program = f"""if True:
        import os, sys
        import vitscale.cli.main
        from vitscale.cli.entry import vitscale

        for number, line in enumerate({[line for line, _ in MISTAKES]}):
            if os.fork() == 0:
                for stream, name in ((1, "out"), (2, "err")):
                    os.dup2(os.open(f"{{number}}.{{name}}", os.O_CREAT | os.O_WRONLY), stream)
                sys.argv = ["vitscale", *line.split()]
                vitscale()
            code = os.waitstatus_to_exitcode(os.wait()[1])
            open(f"{{number}}.code", "w").write(str(code))
    """
    environment = os.environ | {"COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
    for number, (line, words) in enumerate(MISTAKES):
        code, printed, told = ((tmp_path / f"{number}.{name}").read_text() for name in ("code", "out", "err"))
        assert code == "2" and printed == "", line
        assert all(word in told for word in words), told
        assert not re.search("Input should be|Value error|Traceback", told), told


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """One whose second class has a name that ASCII lacks."""
    folder = tmp_path_factory.mktemp("output") / "dataset"
    write_generated_dataset(folder, [12], seed=0)
    edit_manifest(folder, lambda manifest: manifest["class_names"].__setitem__(1, "猫"))
    return folder


WRITERS = [
    ("vitscale", "recipe", "h14_jft"),
    ("vitscale", "shards", "info", "DATASET", "--classes"),
    ("vitscale", "-h"),
    ("vitscale-flops", "b16_jft"),
    ("vitscale-convert", "DATASET", "OUT", "--dry-run"),
]


@pytest.mark.parametrize("command", WRITERS, ids=" ".join)
def test_output_that_nobody_takes(command, dataset, tmp_path):
    arguments = [{"DATASET": dataset, "OUT": tmp_path / "out"}.get(word, word) for word in command]

    def code(line: str) -> tuple[int, list[str]]:
        shell = ["bash", "-c", f"set -o pipefail; {line}", "bash", *entry(*arguments)]
        result = subprocess.run(shell, capture_output=True, text=True, check=False)
        return result.returncode, result.stderr.splitlines()

    full = code('"$@" > /dev/full')
    assert full[0] == 3 and len(full[1]) == 1 and "No space left" in full[1][0]
    closed = code('"$@" >&-')
    assert closed[0] == 3 and len(closed[1]) == 1
    assert code('"$@" | true') == (0, [])
    assert code('"$@" | head -1 > /dev/null') == (0, [])


def test_a_damaged_dataset_is_no_success_for_want_of_a_reader(dataset, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(dataset, damaged)
    (damaged / "shard-00000.beton").write_bytes(b"")
    line = 'set -o pipefail; "$@" | true'
    shell = ["bash", "-c", line, "bash", *entry("vitscale", "shards", "verify", damaged)]
    assert subprocess.run(shell, capture_output=True, check=False).returncode == 3


def test_a_terminal_without_a_character_shows_its_number(dataset):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = run("vitscale", "shards", "info", dataset, "--classes", **ascii_only)
    assert result.returncode == 0 and r"\u732b" in result.stdout


@pytest.mark.parametrize(
    ("command", "imported"),
    [
        (["vitscale", "recipe"], "typer"),
        (["vitscale", "recipe"], "pydantic"),
        (["vitscale", "convert", "nowhere", "out"], "numpy"),
        (["vitscale-convert", "nowhere", "out"], "numpy"),
        (["vitscale-flops"], "pydantic"),
    ],
)
def test_ctrl_c_while_modules_are_imported_leaves_no_trace(command, imported, tmp_path):
    # Sent from inside: from outside it may come when the command has ended.
    finder = f"""if True:
        import os, signal, sys

        class Finder:
            def find_spec(name, path=None, target=None):
                if name.startswith("{imported}."):
                    sys.meta_path.remove(Finder)
                    os.kill(os.getpid(), signal.SIGINT)

        sys.meta_path.insert(0, Finder)
        """
    python, option, program, *arguments = entry(*command)
    assert option == "-c"
    words = [python, "-c", f"{finder}\n{program}", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 130 and "Traceback" not in done.stderr


def test_an_error_that_follows_ctrl_c_leaves_no_trace():
    # As numpy does if it is interrupted while it imports a part of itself.
    program = """if True:
        import os, signal, typer
        from vitscale.cli.command_line import run

        def command():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise RecursionError from None

        app = typer.Typer()
        app.command()(command)
        run(app)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 130 and "Traceback" not in done.stderr


def test_a_name_that_is_not_utf8_is_told_and_no_trace(tmp_path):
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "1.jpg").write_bytes(encoded(make_picture(0, 40, 40)))
    out = os.fsdecode(os.fsencode(tmp_path) + b"/\xe9")
    result = run("vitscale-convert", tmp_path / "images", out, "--workers", 1)
    assert result.returncode == 2 and "UTF-8" in result.stderr
