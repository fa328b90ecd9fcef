"""The commands in pages' blocks of code run, page by page and in order, in their smoke forms: page_commands.yaml."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented_commands import PAGES, PROGRAMS, REPOSITORY, Command, documented_commands, other_commands
from pictures import encoded, make_picture

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("page_commands.yaml").read_text(encoding="utf-8"))
BELOW = {"vitscale": [], "vitscale-convert": ["convert"], "vitscale-flops": ["flops"]}
FAST = ("CONTRIBUTING.md", "docs/planning.md")
PHOTOS = """\
model: {name: ViT-Ti/16, head: linear}
data: {train: photos/train}
batch: {global: 256, micro_max: 64}
objective: {loss: softmax}
optimizer: {name: adamw, lr: 1e-3, weight_decay: 0.1, clip_norm: 1.0}
schedule: {duration: {epochs: 30}, warmup: {epochs: 2}, decay: cosine}
evaluation: {every: {epochs: 5}, validation: photos/test}
"""
STUDY = "settings: {data.root: DATA}\nparts: {one: {recipe: tiny.yaml, seeds: [0, 1]}}\n"


def commands_of(page: str) -> list[Command]:
    ours = [each for each in documented_commands() if each.page == page and each.is_whole]
    return sorted([*ours, *other_commands(REPOSITORY / page)], key=lambda each: each.line)


def page_table(page: str) -> dict[str, Any]:
    return {key: {} for key in ("given", "files", "before", "words", "anew", "adds", "exits")} | (
        TABLE["pages"].get(page, {})
    )


def entries(table: dict[str, Any], command: Command) -> list[Any]:
    """A table's values for the beginning of a command."""
    return [value for beginning, value in table.items() if command.typed.startswith(beginning)]


def of_table(line: str) -> Command:
    """A command as the table has it; of no page, so no page's words are replaced in it."""
    program, *words = shlex.split(line)
    is_ours = program in PROGRAMS
    return Command("", 0, program if is_ours else "sh", tuple(words) if is_ours else (line,), is_whole=True)


def smoke_form(command: Command) -> list[str]:
    table = page_table(command.page)

    def substituted(word: str) -> str:
        for old, new in (table["words"] | TABLE["words"]).items():
            word = re.sub(rf"(?<![\w./-]){re.escape(old)}(?![\w.-])", lambda _, new=new: new, word)
        return word

    launcher, words = ([substituted(word) for word in part] for part in (command.launcher, command.words))
    if command.program == "sh":
        return ["bash", "-euo", "pipefail", "-c", *words]
    added = [word for each in entries(table["adds"], command) for word in each]
    is_study = words[:1] == ["study"] and words[1:2] not in ([], ["plan"])
    if is_study or command.program == "pretrain" or words[:1] == ["launch"]:
        is_of_data = is_study or any("data.root=" in word or word.endswith(".yaml") for word in words)
        settings = [word for setting in TABLE["settings"] for word in ("--set", setting)]
        is_small = bool({"--smoke", "--dry-run"} & {*words, *added})
        words += [] if is_small else settings if is_of_data else ["--smoke"]
    words += added
    if command.program == "pretrain":
        module = ["-m", "vitscale.pretrain"] if launcher[-1] == "-m" else ["vitscale/pretrain.py"]
        return [*launcher, *module, *words]
    if launcher and launcher[-1] == "-m":
        return [*launcher, command.program, *words]
    return [*launcher, sys.executable, "-m", "vitscale", *BELOW[command.program], *words]


def run(folder: Path, command: Command) -> tuple[int, str]:
    """Run a command's smoke form in a folder that is its home, too: exit code, output."""
    environment = {key: value for key, value in os.environ.items() if key != "VITSCALE_DATA_ROOT"} | {
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    places = {"HERE": str(folder), "TESTS": str(REPOSITORY / "tests")}
    argv = [re.sub(r"HERE|TESTS", lambda found: places[found[0]], word) for word in smoke_form(command)]
    argv = [str(folder / word[2:]) if word.startswith("~/") else word for word in argv]
    with (folder / ".output").open("w+") as output:
        ran = subprocess.run(argv, cwd=folder, env=environment, stdout=output, stderr=output, timeout=500, check=False)
        output.seek(0)
        return ran.returncode, f"$ {shlex.join(argv)}\n{output.read()}"


def lay_out(folder: Path) -> Path:
    """What a reader has: a clone, photos, and the recipe for them."""
    for name in ("vitscale", "data_tools", "recipes"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "photos.yaml").write_text(PHOTOS)
    tiny = dict(setting.split("=") for setting in TABLE["settings"])
    model = {key.removeprefix("model."): int(value) for key, value in tiny.items() if key.startswith("model.")}
    (folder / "tiny.yaml").write_text(yaml.safe_dump({"extends": "photos.yaml", "model": model}))
    (folder / "STUDY").write_text(STUDY)
    for split, first, of_each, quality in (("train", 0, 16, 90), ("test", 45, 6, 75)):
        for number in range(3 * of_each):
            path = folder / "photos" / split / ("dress", "hat", "shirt")[number % 3] / f"{number // 3}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(make_picture(first + number, 90, 70), quality=quality))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the table's `made` was done."""
    folder = lay_out(tmp_path_factory.mktemp("made"))
    for line in TABLE["made"]:
        code, output = run(folder, of_table(line))
        assert code == 0, output
    return folder


def a_page(page: Path) -> Any:
    name = str(page.relative_to(REPOSITORY))
    return pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow], id=name)


@pytest.mark.parametrize("page", [a_page(page) for page in PAGES])
def test_the_commands_of_a_page_run_in_its_order(page, request, tmp_path):
    to_run = [command for command in commands_of(page) if not entries(TABLE["not_run"], command)]
    if not to_run:
        return
    table, folder = page_table(page), lay_out(tmp_path)
    for name, source in table["given"].items():
        copied, target = request.getfixturevalue("made") / source, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if copied.is_dir():
            shutil.copytree(copied, target, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy(copied, target)
    shown = re.findall(r"`([\w-]+\.yaml)`[^\n]*:\n\n((?:    .*\n|\n(?=    ))+)", (REPOSITORY / page).read_text("utf-8"))
    for name, text in (*table["files"].items(), *((name, re.sub(r"(?m)^    ", "", block)) for name, block in shown)):
        (folder / name).write_text(text)
    failed = []
    for command in (*(of_table(line) for line in table["before"]), *to_run):
        for result in entries(table["anew"], command):
            shutil.rmtree(folder / result, ignore_errors=True)
        started = time.monotonic()
        code, output = run(folder, command)
        print(command.typed, code, f"{time.monotonic() - started:.1f} s", flush=True)
        if code != (entries(table["exits"], command) or [0])[0]:
            failed.append(f"{command}\n{output}\nended with {code}")
            print(failed[-1][-2500:], flush=True)
    assert not failed, "\n\n".join(failed)


def test_what_is_not_run_is_still_in_a_page():
    typed = [command.typed for page in PAGES for command in commands_of(str(page.relative_to(REPOSITORY)))]
    gone = [each for each in TABLE["not_run"] if not any(one.startswith(each) for one in typed)]
    gone += [page for page in TABLE["pages"] if not commands_of(page)]
    for page, table in TABLE["pages"].items():
        typed = [command.typed for command in commands_of(page)]
        beginnings = [each for part in ("anew", "adds", "exits") for each in table.get(part, {})]
        gone += [f"{page}: {each}" for each in beginnings if not any(one.startswith(each) for one in typed)]
    assert not gone
