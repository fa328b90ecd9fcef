"""Conversions that are killed, starved and shared; what comes out equals one that was left in peace."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from datasets_on_disk import command, contents, run, run_here, start
from dedup_data import index_of, source_of
from faulty_calls import run_with_fault
from kill_at import convert_killed_at
from pictures import encoded, make_picture
from processes import wait_until
from small_disk import small_disk
from small_files import write_files
from test_worker_processes import workers_of

from data_tools.conversion import convert
from data_tools.machine import Machine
from data_tools.request import Request
from vitscale.data.shards import Manifest
from vitscale.ground.errors import DataError

SHARDS = ("--shard-samples", 6, "--max-reject-rate", 0.2)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """120 pictures that take some time, a tenth of them of no use."""
    pngs = (encoded(make_picture(i, 300, 300), "PNG", compress_level=1) for i in range(120))
    cut = ((f"class{i % 5}/{i:03d}.png", png[: 1000 if i % 10 == 9 else None]) for i, png in enumerate(pngs))
    return write_files(tmp_path_factory.mktemp("pictures"), *cut)


@pytest.fixture(scope="module")
def whole(pictures, tmp_path_factory) -> tuple[Path, float]:
    """What comes out in peace, and the seconds it took."""
    out, started = tmp_path_factory.mktemp("peace") / "out", time.monotonic()
    done = run(pictures, out, *SHARDS)
    assert done.returncode == 0 and Manifest.load(out).num_rejected == 12
    return out, time.monotonic() - started


@pytest.fixture(scope="module")
def in_peace(whole) -> dict[str, bytes]:
    return contents(whole[0])


@pytest.mark.parametrize(
    ("folder", "call"), [(".vitscale-convert/listing", 2), (".", 4), pytest.param(".", 1, marks=pytest.mark.slow)]
)
def test_a_disk_that_fails_once_is_named_and_the_repeated_command_goes_on(pictures, in_peace, tmp_path, folder, call):
    """Not the source, whatever is being flushed: the list of it, a shard, a table."""
    out = tmp_path / "out"
    arguments = *command(pictures, out, *SHARDS), "--workers", 1
    script = "import subprocess, sys; print(subprocess.run(sys.argv[1:], capture_output=True, text=True).stderr)"
    said = run_with_fault(f"fsync:error=EIO:when={call}", script, *arguments, path=out / folder)
    assert said.startswith(f"error: {out}"), said
    assert not (out / "manifest.json").exists()
    assert run_here(pictures, out, *SHARDS).exit_code == 0
    assert contents(out) == in_peace


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_and_started_again(pictures, whole, in_peace, tmp_path, kills):
    out, chance = tmp_path / "out", random.Random(kills)
    died = 0
    for _ in range(kills):
        process = start(pictures, out, *SHARDS)
        time.sleep(chance.uniform(0.1, whole[1]))
        if chance.random() < 0.5:
            process.kill()  # its workers have to notice by themselves
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=20)
        died += process.returncode == -signal.SIGKILL
    assert died
    assert run_here(pictures, out, *SHARDS).exit_code == 0
    assert contents(out) == in_peace


@pytest.mark.slow
def test_killed_after_every_rename(pictures, tmp_path):
    """Every point of the converter itself at which something has just come into being; workers have their own."""
    write_files(tmp_path / "tests", ("a.png", (pictures / "class0" / "000.png").read_bytes()))
    index_of(tmp_path / "index", [source_of(tmp_path / "tests", preset="exact")])

    def attempt(kill_at: int, out: Path) -> subprocess.CompletedProcess[str]:
        return convert_killed_at(kill_at, pictures, out, 30, tmp_path / "index")

    whole = attempt(0, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    expected = contents(tmp_path / "whole")
    for kill_at in range(1, int(whole.stdout) + 1):
        out = tmp_path / str(kill_at)
        assert attempt(kill_at, out).returncode == -signal.SIGKILL
        again = attempt(0, out)
        assert again.returncode == 0, again.stderr
        assert contents(out) == expected


def test_a_killed_worker_is_replaced(pictures, in_peace, tmp_path):
    process = start(pictures, tmp_path / "out", *SHARDS)
    wait_until(lambda: list(tmp_path.glob("out/.shard-*.part")))
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert contents(tmp_path / "out") == in_peace


def test_interrupted_and_continued(pictures, in_peace, tmp_path):
    out, done = tmp_path / "out", tmp_path / "out" / ".vitscale-convert" / "done"
    for how in (signal.SIGINT, signal.SIGTERM):
        already = set(done.glob("*.json"))
        process = start(pictures, out, *SHARDS)
        wait_until(lambda already=already: set(done.glob("*.json")) - already)
        workers = workers_of(process.pid)
        os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
        _, message = process.communicate(timeout=20)
        assert process.returncode == 130 and "Traceback" not in message
        assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]
        assert not (out / "manifest.json").exists()
    before = {path: path.stat().st_mtime_ns for path in out.glob("shard-*.beton")}
    again = run_here(pictures, out, *SHARDS)
    assert again.exit_code == 0 and "already done" in again.stdout
    assert contents(out) == in_peace
    assert any(path.stat().st_mtime_ns == when for path, when in before.items())  # they were not written again


def test_task_ranges_and_merge(pictures, in_peace, tmp_path):
    out = tmp_path / "out"
    for i in (0, 2):
        done = run_here(pictures, out, *SHARDS, "--task-range", f"{i}/3")
        assert done.exit_code == 0, done.stderr
        assert "task range" in done.stdout and f"vitscale-convert --merge {out}" in done.stdout.replace("\n", "")
    early = run_here("--merge", out, "--max-reject-rate", 0.2)
    assert early.exit_code == 2 and "7 of 20" in early.stderr and "6-12" in early.stderr
    assert not (out / "manifest.json").exists()
    assert run_here(pictures, out, *SHARDS, "--task-range", "1/3").exit_code == 0
    strict = run_here("--merge", out)
    assert strict.exit_code == 3 and "12 of 120" in strict.stderr
    merged = run_here("--merge", out, "--max-reject-rate", 0.2)
    assert merged.exit_code == 0, merged.stderr
    assert contents(out) == in_peace


@pytest.fixture(scope="module")
def unmerged(tmp_path_factory) -> tuple[Path, Path]:
    """Four pictures, and their conversion, all of it done but the manifest."""
    folder = tmp_path_factory.mktemp("unmerged")
    src = write_files(folder / "src", *((f"{i}.png", encoded(make_picture(i, 20, 20), "PNG")) for i in range(4)))
    for part in ("0/2", "1/2"):
        assert run_here(src, folder / "out", "--unlabelled", "--shard-samples", 2, "--task-range", part).exit_code == 0
    return src, folder / "out"


@pytest.mark.parametrize(
    ("file", "keys", "value", "merged", "again"),
    [
        ("conversion.json", ("plan", "splits", 0, "name"), "../precious", 2, 2),
        ("conversion.json", ("plan", "splits", 0, "shards"), 10**9, 2, 2),
        ("conversion.json", ("plan", "splits", 0, "images"), 10**9, 2, 2),
        ("conversion.json", ("plan",), {}, 2, 2),
        ("conversion.json", ("plan",), [1], 2, 2),
        ("conversion.json", ("indexes",), [{}], 2, 0),
        ("plan.json", ("splits", 0, "name"), "../precious", 0, 2),
        ("plan.json", (), [1], 0, 2),
        ("done/000000.json", ("split",), "../precious", 2, 2),
        ("done/000000.json", ("task",), 1, 2, 2),
        ("done/000000.json", ("entry", "samples"), "2", 2, 2),
        ("done/000000.json", (), None, 2, 2),
        ("plan-00.arrow", None, b"anything", 0, 2),
    ],
)
def test_state_that_a_stranger_wrote_is_refused(unmerged, tmp_path, file, keys, value, merged, again):
    """None of it leads to another folder."""
    src, done = unmerged
    precious = write_files(tmp_path / "precious", ("manifest.json", b"{}"), ("rejects.parquet", b"rows"))
    for asked, code in ((("--merge",), merged), ((src, "--unlabelled", "--shard-samples", 2), again)):
        out = tmp_path / f"out-{len(asked)}"
        shutil.copytree(done, out)
        path = out / ".vitscale-convert" / file
        path.write_bytes(
            value if keys is None else json.dumps(_with(json.loads(path.read_bytes()), keys, value)).encode()
        )
        said = run_here(asked[0], out, *asked[1:])
        assert said.exit_code == code and isinstance(said.exception, SystemExit | None), said.output
    assert contents(precious) == {"manifest.json": b"{}", "rejects.parquet": b"rows"}


def _with(content: Any, keys: tuple[str | int, ...], value: object) -> Any:
    if not keys:
        return value
    content[keys[0]] = _with(content[keys[0]], keys[1:], value)
    return content


def test_two_converters_refuse_each_other(pictures, in_peace, tmp_path):
    out = tmp_path / "out"
    first = start(pictures, out, *SHARDS, "--task-range", "0/2")
    wait_until(lambda: list(out.glob(".shard-*.part")))
    os.kill(first.pid, signal.SIGSTOP)
    try:
        for arguments, code, message in (
            (SHARDS, 2, f"another vitscale-convert (process {first.pid}"),
            ((*SHARDS, "--task-range", "1/4"), 2, "tasks 0/2"),
            (("--shard-samples", 7, "--task-range", "1/2"), 2, "shard_samples: 6 before, 7 now"),
            ((*SHARDS, "--quality", 80, "--task-range", "1/2"), 2, "quality: 95 before, 80 now"),
            ((*SHARDS, "--task-range", "1/2", "--workers", 1), 0, ""),  # workers change nothing
        ):
            done = run_here(pictures, out, *arguments)
            assert done.exit_code == code and message in done.stderr and "Traceback" not in done.stderr, done.stderr
        merge = run_here("--merge", out)
        assert merge.exit_code == 2 and "another vitscale-convert" in merge.stderr
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert first.wait(timeout=60) == 0
    first.communicate()
    assert run_here("--merge", out, "--max-reject-rate", 0.2).exit_code == 0
    assert contents(out) == in_peace


def test_a_shard_that_was_lost_is_written_again(pictures, in_peace, tmp_path):
    out = tmp_path / "out"
    for i in (0, 1):
        assert run_here(pictures, out, *SHARDS, "--task-range", f"{i}/2").exit_code == 0
    (out / "shard-00003.beton").unlink()
    (out / "shard-00011.beton").write_bytes(b"cut")
    merge = run_here("--merge", out, "--max-reject-rate", 0.2)
    assert merge.exit_code == 2 and "2 of 20" in merge.stderr and "3, 11" in merge.stderr
    assert run_here(pictures, out, *SHARDS).exit_code == 0
    assert contents(out) == in_peace


def test_a_full_disk(pictures, in_peace, tmp_path):
    """A file system of 1 MB: more than a shard and less than all."""
    with small_disk(tmp_path / "small", "1m") as mount:
        done = run(pictures, mount / "out", *SHARDS)
        assert done.returncode == 3 and "No space left on device" in done.stderr and "Traceback" not in done.stderr
        assert list(mount.glob("out/shard-*.beton")) and not (mount / "out" / "manifest.json").exists()
        subprocess.run(["mount", "-o", "remount,size=400m", mount], check=True)
        done = run_here(pictures, mount / "out", *SHARDS)
        assert done.exit_code == 0 and "already done" in done.stdout
        assert contents(mount / "out") == in_peace


def test_files_that_vanish_between_listing_and_reading(here, tmp_path, photos):
    write_files(tmp_path / "images" / "cat", *((f"{i:02d}.jpg", photo) for i, photo in enumerate(photos)))
    rows = "".join(f"images/cat/{i:02d}.jpg,cat\n" for i in range(21))  # the last is nowhere
    (tmp_path / "list.csv").write_text(f"path,label\n{rows}")
    request, out = Request(str(tmp_path / "list.csv"), shard_samples=5), tmp_path / "out"
    with pytest.raises(DataError, match=r"\b1 of 21\b(.|\n)*20\.jpg'"):
        convert(request, out, Machine(workers=1, max_reject_rate=0.0))
    (tmp_path / "images" / "cat" / "20.jpg").write_bytes(photos[0])
    (tmp_path / "images" / "cat" / "07.jpg").unlink()  # its shard may be done: then nobody misses it
    outcome = convert(request, out, Machine(workers=1, max_reject_rate=0.05))
    rejects = out / "rejects.parquet"
    missed = [row["key"] for row in pq.read_table(rejects).to_pylist()] if rejects.exists() else []
    assert outcome.manifests[""].num_samples == 21 - len(missed) and "images/cat/20.jpg" not in missed
