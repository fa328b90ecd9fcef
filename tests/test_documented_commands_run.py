"""The commands of the pages in their smoke form: on a small run, on small datasets and photos, each of them ends well.

What tests/test_documented_commands.py runs already, and what whole examples run in their order (tests/test_readme.py,
tests/test_photos_example.py), is not run again.
"""

import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from documented_commands import Command
from pictures import encoded, make_picture
from test_documented_commands import APPS, COMMANDS, cheap_commands, parsed
from typer.testing import CliRunner

from vitscale.errors import VitscaleError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

IN_EXAMPLES = {"docs/photos_example.md"}
LEFT_OUT = {
    "launch": "test_documented_commands.py has its dry run",
    "study": "as launch",
    "demo": "tests/test_package.py",
    "doctor": "ends with 2 where this machine lacks something: tests/cli/test_doctor.py",
    "vtab": "needs copies of VTAB's data sets: tests/data_tools",
    "adopt": "needs a file of FFCV's own writer: tests/shards",
    "cifar-10-python.tar.gz": "needs that file: tests/data_tools",
    "dinov3-vits16/": "needs weights of DINOv3: tests/models",
    "coarse": "needs a list with that column: tests/data_tools",
    "--merge": "needs all parts of a conversion: tests/data_tools",
    "ray": "needs a Ray cluster: tests/data_tools",
    "--install-completion": "changes the shell's files: tests/cli",
    "--show-completion": "asks which shell called it: tests/cli",
}
RECIPE = {
    "model": {"patch_size": 8, "width": 32, "depth": 2, "mlp_dim": 32, "num_heads": 2, "head": "linear"},
    "data": {"train": "photos/train", "image_size": 32},
    "batch": {"global": 8, "micro_max": 8},
    "objective": {"loss": "softmax"},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "schedule": {"duration": {"steps": 6}},
    "evaluation": {"validation": "photos/test"},
    "checkpoint": {"every": {"steps": 2}, "keep": 3},
}
WORDS = {"KEY": "seed", "NAME": "ViT-Ti/16", "PART": "distance", "h14_jft": "demo", "RECIPE": "own.yaml"}
"""What pages write -> what it stands for here."""


def run(words: list[str], program: str = "vitscale") -> str:
    result = CliRunner().invoke(APPS[program], words)
    if isinstance(result.exception, VitscaleError):
        raise result.exception
    assert result.exit_code == 0, f"{words}: {result.output}"
    return result.output


# ---- What commands are given -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def things(tmp_path_factory) -> Path:
    """One of each thing that a command takes, by its kind: images, run, index, ..."""
    folder = tmp_path_factory.mktemp("things")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for split, of_each, seed in (("train", 12, 0), ("test", 4, 1000)):
            for number in range(3 * of_each):
                file = folder / "images" / split / f"class{number % 3}" / f"{number}.jpg"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(encoded(make_picture(seed + number, 48, 40)))
        run(["convert", "images/train", "data/photos/train", "--workers", "1"])
        run(["convert", "images/test", "data/photos/test", "--workers", "1", "--classes", "data/photos/train"])
        Path("own.yaml").write_text(yaml.safe_dump(RECIPE))
        run(["launch", "own.yaml", "--ranks", "1", "--run-dir", "run", "--set", f"data.root={folder / 'data'}"])
        run(["dedup", "index", "test=data/photos/test", "--out", "index"])
        run(["dedup", "find", "data/photos/train", "index", "--out", "found"])
        run(["features", "run", "data/photos/train", "--out", "features"])
        run(["inspect", "run", "--images", "images/test", "--out", "inside", "--show", "filters"])
        run(["report", "run", "-o", "report"])
        run(["export", "ViT-B/16", "--format", "npz", "--out", "weights.npz"])
        for name, mode in (("archive.tar", "w"), ("archive.tar.xz", "w:xz")):
            with tarfile.open(name, mode) as archive:
                archive.add("images/train", ".")
        Path("uids.txt").write_text("3\n4\n")
    return folder


def _kind(parameter: str, word: str) -> str | None:
    """The thing that a word stands for, as the file in `things`; None for a word that names no file."""
    match parameter:
        case "src" | "testsets":
            archives = {".tar": "archive.tar", ".xz": "archive.tar.xz"}
            return archives.get(Path(word).suffix, "data/photos/train" if word.startswith("DATA/") else "images/train")
        case "dataset" | "classes" | "data" | "neighbours" | "a" | "b":
            return "data/photos/test" if "test" in word or "val" in word else "data/photos/train"
        case "train" | "test":
            return f"data/photos/{parameter}" if word == "DATASET" else "features"
        case "dedup_against" | "indexes":
            return "index"
        case "run" | "runs" | "sources" | "embedding":
            return "run"
        case "source":
            return None if word.startswith("ResNet") else "weights.npz" if word.endswith(".npz") else "run"
        case "images":
            return "images/test/class0/0.jpg" if word == "IMAGE" else "images/test"
        case "samples":
            by_word = {"uids.txt": "uids.txt", "LIST": "uids.txt", "folder": "images/train/class0"}
            return None if word.isdigit() else by_word.get(word, "images/train/class0/0.jpg")
        case "found" | "report":
            return parameter
        case "inspected":
            return "inside"
        case "root":
            return "data"
        case "folder":
            return "run"
    return "own.yaml" if word.endswith(".yaml") else None


def _provide(command: Command, things: Path, here: Path) -> None:
    """Copies of all that a command asks for, where it asks for it."""
    for parameter, value in parsed(command).items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(each, str | Path):
                continue
            word = str(each).rpartition("=")[2]
            kind, target = _kind(parameter, word), here / word.lstrip("/")
            if kind is not None and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                copy: Callable = shutil.copytree if (things / kind).is_dir() else shutil.copy
                copy(things / kind, target)


# ---- The commands ----------------------------------------------------------------------------------------------------


def _left() -> Iterator[Command]:
    ran = {id(command) for command, _ in cheap_commands()}
    for command in COMMANDS:
        is_ours = command.is_whole and command.program != "pretrain" and command.page not in IN_EXAMPLES
        if is_ours and id(command) not in ran and not LEFT_OUT.keys() & set(command.words):
            yield command


@pytest.mark.parametrize("command", list(_left()), ids=str)
def test_a_command_of_a_page_ends_well(command, things, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITSCALE_DATA_ROOT", str(tmp_path))
    words = [WORDS.get(word, word.lstrip("/")) for word in command.words]
    _provide(Command(command.page, command.line, command.program, tuple(words), True), things, tmp_path)
    for word in ("own.yaml", "photos.yaml"):
        (tmp_path / word).write_text(yaml.safe_dump(RECIPE))
    if "status" in words and "--hardware" in words:
        words[words.index("--hardware") + 1] = "h100"
    run(words, command.program)
