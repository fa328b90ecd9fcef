import io
import json
import re
import stat
from pathlib import Path

import pytest
from datasets_on_disk import contents, run, run_here
from messages import assert_messages
from pictures import encoded, make_picture
from rich.console import Console
from small_files import write_files

from data_tools import report
from data_tools.report import ProgressDisplay
from vitscale.data.shards import Manifest, ShardFile
from vitscale.data.shards.generated import write_generated_dataset


def named(photos, pattern="{}.jpg", first=0):
    return ((pattern.format(i), photo) for i, photo in enumerate(photos, first))


def test_command(image_folder, tmp_path):
    out = tmp_path / "out"
    done = run(image_folder, out, "--shard-samples", 8, "--shuffle-seed", 5, "--workers", 1, umask=0)
    assert not [path for path in (out, *out.rglob("*")) if path.stat().st_mode & stat.S_IWOTH]
    assert (done.returncode, done.stderr) == (0, "")
    for line in ("22 images of 3 classes in 3 shards", "passed through", "1 hidden, 1 no image suffix", "images/s"):
        assert line in done.stdout
    events = [json.loads(line)["event"] for line in (out / "convert.log.jsonl").read_text().splitlines()]
    assert events == ["start", "shard", "shard", "shard", "tasks done"]
    before = contents(out)

    again = run_here(image_folder, out, "--shard-samples", 8, "--shuffle-seed", 5)
    assert again.exit_code == 0 and "already complete; nothing was done" in again.stdout
    other = run_here(image_folder, out, "--shard-samples", 9, "--shuffle-seed", 5)
    assert other.exit_code == 2 and other.stderr.count("\n") == 1
    assert_messages("convert", {"complete dataset": other.stderr.rstrip()}, {out: "OUT"})
    assert contents(out) == before


def test_dry_run(tmp_path, image_folder):
    arguments = "--shard-samples", 8, "--split", "val=6", "--split", "train=rest"
    done = run_here(image_folder, tmp_path / "out", "--dry-run", *arguments)
    assert done.exit_code == 0 and not (tmp_path / "out").exists()
    lines = [re.sub(r"[^\w ,]+", "", line).strip() for line in done.stdout.splitlines()]
    told = "\n".join(re.sub(r" +", " ", line) for line in lines)
    for line in ("images of val 6", "images of train 16", "classes 3", "shards 3 of 8", "images probed 22, of which 0"):
        assert line in told
    assert run_here(image_folder, tmp_path / "real", *arguments).exit_code == 0
    true = sum(path.stat().st_size for path in (tmp_path / "real").rglob("*.beton"))
    said = int(re.search(r"bytes, about (\S+)", told)[1].replace(",", ""))
    assert abs(said - true) < 30


def row_of(table, name):
    """A cell of a table on the terminal."""
    return re.search(rf"│ {name} +│ +(.*?) *│", table)[1]


def test_missing_labels(tmp_path, photos):
    """More than one in a hundred must be said to be meant; what is mended goes on in the same folder."""
    write_files(tmp_path, *named(photos, "{:02d}.jpg"))
    table = tmp_path / "list.csv"

    def listed(labels):
        table.write_text("path,label\n" + "".join(f"{i:02d}.jpg,{label}\n" for i, label in enumerate(labels)))

    count = len(photos)
    listed(["", "-1", *["cat", "dog"] * count][:count])
    done = run_here(table, tmp_path / "out", "--workers", 1)
    assert done.exit_code == 3 and not (tmp_path / "out" / "manifest.json").exists()
    assert f"2 of {count} images" in done.stderr and "'00.jpg'" in done.stderr and "--allow-unlabelled" in done.stderr
    said = run_here(table, tmp_path / "out", "--workers", 1, "--dry-run")
    assert said.exit_code == 0 and row_of(said.stdout, "unlabelled") == "2"
    done = run_here(table, tmp_path / "allowed", "--workers", 1, "--allow-unlabelled")
    assert done.exit_code == 0 and row_of(done.stdout, "unlabelled") == "2"
    listed(["cat", "dog"] * count)
    table.write_text("".join(table.read_text().splitlines(keepends=True)[: count + 1]))
    done = run_here(table, tmp_path / "out", "--workers", 1)
    assert done.exit_code == 0 and row_of(done.stdout, "unlabelled") == "0"
    listed([-1] * count)  # a test set whose labels are secret
    assert run_here(table, tmp_path / "secret", "--workers", 1).exit_code == 0


def test_odd_classes_are_told(tmp_path, photos):
    write_files(tmp_path, *named(photos[:4]))
    for name, labels, told in (
        ("one", ["cat"] * 4, ["'cat'"]),
        ("case", ["Dog", "dog", "cat", "owl"], ["'Dog', 'dog'"]),
        ("form", ["caf\u00e9", "cafe\u0301", "Caf\u00e9", "x"], ["caf\\xe9", "Caf\u00e9"]),
        ("gap", ["0", "7", "7", "3"], ["1-2, 4-6"]),
        ("fine", ["cat", "dog", "owl", "cat"], []),
    ):
        rows = "".join(f"{i}.jpg,{label}\n" for i, label in enumerate(labels))
        (tmp_path / f"{name}.csv").write_text(f"path,label\n{rows}")
        done = run_here(tmp_path / f"{name}.csv", tmp_path / name, "--workers", 1)
        notes = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
        assert done.exit_code == 0 and len(notes) == len(told)
        assert all(what in note for what, note in zip(told, notes, strict=True))


def test_limits_of_size(tmp_path):
    pictures = (encoded(make_picture(1, *size)) for size in ((60, 100), (100, 60), (20, 30)))
    write_files(tmp_path / "images", *named(pictures, "x/{}.jpg"))
    done = run_here(tmp_path / "images", tmp_path / "out", "--short-side", 30, "--quality", 80, "--workers", 1)
    assert done.exit_code == 0, done.stderr
    with ShardFile(tmp_path / "out" / "shard-00000.beton") as shard:
        sizes = set(zip(shard.height.tolist(), shard.width.tolist(), strict=True))
    assert sizes == {(30, 50), (50, 30), (20, 30)}
    options = Manifest.load(tmp_path / "out").options
    assert (options["short_side"], options["jpeg_quality"]) == (30, 80)


def test_a_subset_copies_nothing(tmp_path):
    write_generated_dataset(tmp_path / "all", [8, 8])
    done = run_here(tmp_path / "all", tmp_path / "ten", "--subset", "10")
    assert done.exit_code == 0 and "10 samples" in done.stdout
    assert Manifest.load(tmp_path / "ten").num_samples == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{images}",), "expected SRC and OUT"),
        (("{images}", "{out}", "--task-range", "2/2"), "expected i/n with i from 0 to n-1"),
        (("{images}", "{out}", "--split", "val"), "expected NAME=WHAT"),
        (("{images}", "{out}", "--subset", "lots"), "'lots'"),
        (("{images}", "{out}", "--subset", "10", "--quality", "50"), "with --subset"),
        (("--merge", "{out}", "--workers", "2"), "with --merge"),
        (("--merge", "{out}"), "no unfinished conversion there"),
        (("{images}", "{images}/out"), "lies inside SRC"),
        (("{images}/nothing", "{out}"), "no such file or directory"),
    ],
)
def test_what_cannot_be_done(tmp_path, image_folder, arguments, message):
    filled = [text.format(images=image_folder, out=tmp_path / "out") for text in arguments]
    done = run_here(*filled)
    assert done.exit_code == 2, done.stderr
    assert message in done.stderr and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert not Path(tmp_path / "out" / "manifest.json").exists()


def shown(terminal: bool, images: int | None = 1000) -> str:
    out = io.StringIO()
    with ProgressDisplay(Console(file=out, force_terminal=terminal, width=120), "converting", images) as view:
        view.update(250, 2)
        view.update(1000, 3)
    return out.getvalue()


def test_lines_where_there_is_no_terminal(monkeypatch):
    assert shown(terminal=False) == ""  # not every update is a line
    monkeypatch.setattr(report, "_LINE_SECONDS", 0)
    first, second = shown(terminal=False).splitlines()
    assert first.startswith("converting: 250 of 1,000 images, ") and first.endswith(" s left, rejected 2")
    assert second.startswith("converting: 1,000 of 1,000 images, ")
    assert shown(terminal=False, images=None).startswith("converting: 250 images, ")


def test_bar_on_a_terminal():
    assert "1000/1000" in shown(terminal=True) and "images/s" in shown(terminal=True)
