"""Conversions from and to a real S3 server, equal to those of local files byte for byte; and what goes wrong."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from commands import command
from datasets_on_disk import contents, run_here, start
from messages import refusal
from processes import wait_until
from s3_server import SECRET, S3Server
from small_files import pack, write_files

from data_tools.conversion import convert, merge
from data_tools.machine import Machine, TaskRange
from data_tools.request import Request
from vitscale.ground.errors import RecipeError

ONE = Machine(workers=1)
SMALL = ("--shard-samples", 4, "--workers", 1)


@pytest.fixture(scope="module")
def uploaded(s3, image_folder):
    return s3.put(image_folder, "images")


def test_a_folder_at_a_url_gives_the_same_bytes_and_costs_a_request_an_image(s3, uploaded, local, tmp_path):
    before = s3.mark()
    convert(Request(uploaded, shard_samples=4), tmp_path / "out", ONE)
    assert contents(tmp_path / "out") == contents(local)
    of_images = [name for verb, name in s3.accesses(before) if name.lower().endswith((".jpg", ".png"))]
    assert len(of_images) == len(set(of_images)) == 22


@pytest.mark.parametrize("name", ["images.tar", "images.tar.gz"])
def test_an_archive_at_a_url_gives_the_same_bytes(here, s3, image_folder, local, tmp_path, name):
    url = s3.put(pack(image_folder, tmp_path / name), name)
    convert(Request(url, shard_samples=4), tmp_path / "out", ONE)
    assert contents(tmp_path / "out") == contents(local)


def test_names_of_objects_may_be_anything_and_objects_may_be_empty(here, s3, photos, tmp_path):
    names = ["50% #1?.jpg", "a b+c&d.jpg", "äöü [1]*.jpg", "%41.jpg", "empty.jpg"]
    write_files(tmp_path / "odd" / "cat", *zip(names, [*photos[:4], b""], strict=True))
    for path in sorted((tmp_path / "odd" / "cat").iterdir()):  # one by one: as a folder, s3fs takes some for patterns
        s3.filesystem().pipe_file(f"bucket/odd/cat/{path.name}", path.read_bytes())
    for src in (str(tmp_path / "odd"), "s3://bucket/odd"):
        convert(Request(src), tmp_path / f"of-{src[:2].strip('/')}", Machine(workers=1, max_reject_rate=0.5))
    first, second = (contents(path) for path in sorted(tmp_path.glob("of-*")))
    assert first == second
    assert pq.read_table(tmp_path / "of-s3" / "rejects.parquet").to_pylist() == [
        {"key": "cat/empty.jpg", "reason": "empty file (0 bytes)"}
    ]


def test_an_output_at_a_url_is_equal_and_its_manifest_is_put_last(s3, image_folder, local):
    before = s3.mark()
    convert(Request(str(image_folder), shard_samples=4), "s3://bucket/out/", ONE)
    assert contents(s3.bucket / "out") == contents(local)
    created = s3.created(before)
    files = [name for name in created if "conversion.json" not in name]  # that one gets the plan later
    assert len(files) == len(set(files))  # one request a file
    shards = [f"out/shard-{i:05d}{suffix}" for i in range(6) for suffix in (".beton", ".idx.parquet")]
    assert set(created) >= set(shards)
    for i in range(6):  # a marker promises the files of its shard
        marker = created.index(f"out/.vitscale-convert/done/{i:06d}.json")
        assert max(created.index(name) for name in shards[2 * i : 2 * i + 2]) < marker
    assert created[-1] == "out/manifest.json"
    assert not (s3.bucket / "out" / ".vitscale-convert").exists()
    assert not list((Path(os.environ["XDG_CACHE_HOME"]) / "vitscale").iterdir())
    assert SECRET not in (s3.bucket / "out" / "convert.log.jsonl").read_text()
    # Nothing is asked for a task that cannot be done yet.
    first_shard = next(i for i, (verb, name) in enumerate(s3.accesses(before)) if name.startswith("out/shard"))
    assert not [name for verb, name in s3.accesses(before)[:first_shard] if "done/0" in name]

    again = convert(Request(str(image_folder), shard_samples=4), "s3://bucket/out", ONE)
    assert again.was_complete and contents(s3.bucket / "out") == contents(local)
    with pytest.raises(RecipeError, match="s3://bucket/out"):
        convert(Request(str(image_folder), shard_samples=5), "s3://bucket/out", ONE)
    assert command("shards", "verify", "s3://bucket/out").returncode == 0


def kill_at(s3: S3Server, marker: str, *arguments: object, how: int = signal.SIGKILL) -> subprocess.Popen[str]:
    """Start a conversion and kill it as soon as the server has got an object of that name."""
    before, process = s3.mark(), start(*arguments)
    wait_until(lambda: process.poll() is not None or any(name.endswith(marker) for name in s3.created(before)))
    process.send_signal(how)
    return process


def test_killed_and_repeated_also_without_what_this_machine_knew(here, s3, image_folder, local):
    out = "s3://bucket/killed"
    killed = kill_at(s3, "done/000001.json", image_folder, out, *SMALL)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not (s3.bucket / "killed" / "manifest.json").exists()
    shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"]) / "vitscale")
    changed = Request(str(image_folder), shard_samples=4, shuffle_seed=7)
    with pytest.raises(RecipeError, match=r"shuffle_seed: .*\b7\b"):
        convert(changed, out, ONE)
    before = s3.mark()
    convert(Request(str(image_folder), shard_samples=4), out, ONE)
    assert contents(s3.bucket / "killed") == contents(local)
    assert "killed/shard-00000.beton" not in s3.created(before)


def test_what_is_not_ours_is_refused_and_left_alone(s3, image_folder, photos):
    s3.filesystem().pipe_file("bucket/thesis/chapter.tex", b"...")
    with pytest.raises(RecipeError, match=r"'chapter\.tex'"):
        convert(Request(str(image_folder)), "s3://bucket/thesis", ONE)
    assert contents(s3.bucket / "thesis") == {"chapter.tex": b"..."}
    for out in ("s3://bucket/run[1]", "s3://", "nothing://at/all", "gs://bucket/out"):
        with refusal(RecipeError, "convert", out):
            convert(Request(str(image_folder)), out, ONE)
    with pytest.raises(RecipeError, match="SRC s3://bucket/images"):
        convert(Request("s3://bucket/images"), "s3://bucket/images/out", ONE)
    with pytest.raises(RecipeError, match="s3://bucket/nowhere"):
        convert(Request("s3://bucket/nowhere"), "s3://bucket/empty", ONE)


def test_errors_of_the_command_line_are_short_and_keep_secrets(s3, image_folder):
    for bucket, name, value, words in (
        ("no-such-bucket", "AWS_SECRET_ACCESS_KEY", SECRET, "bucket does not exist"),
        ("bucket", "AWS_SECRET_ACCESS_KEY", "wrong-" + SECRET, "Forbidden"),
        ("bucket", "AWS_PROFILE", "nobody", "nobody"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            s3.filesystem().clear_instance_cache()
            done = run_here(image_folder, f"s3://{bucket}/forbidden", *SMALL)
        s3.filesystem().clear_instance_cache()
        assert done.exit_code == 3 and words in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1 and SECRET not in done.stderr + done.stdout


@pytest.mark.slow
def test_a_server_that_dies_is_told_and_the_command_goes_on_later(s3, image_folder, local):
    out = "s3://bucket/outage"
    process = kill_at(s3, "done/000001.json", image_folder, out, *SMALL, how=signal.SIGCONT)
    s3.kill()
    try:
        _, errors = process.communicate(timeout=100)
    finally:
        s3.start()
    assert process.returncode == 75, errors
    assert errors.count("\n") == 1 and "does not answer" in errors and "Repeat the command" in errors
    assert "Traceback" not in errors and SECRET not in errors
    assert not (s3.bucket / "outage" / "manifest.json").exists()
    convert(Request(str(image_folder), shard_samples=4), out, ONE)
    assert contents(s3.bucket / "outage") == contents(local)


def test_task_ranges_on_machines_that_share_nothing_but_the_url(here, s3, image_folder, local, tmp_path):
    out, request = "s3://bucket/ranges", Request(str(image_folder), shard_samples=4)
    write_files(tmp_path / "third", "thesis.tex")
    for i in range(2):
        convert(request, out, Machine(workers=1, tasks=TaskRange(i, 2), work=tmp_path / f"machine{i}"))
        if i == 0:
            with pytest.raises(RecipeError, match=r"\b3 of 6\b.*\b3-5\b"):
                merge(out, 0.01, tmp_path / "third")
    merge(out, 0.01, tmp_path / "third")
    assert contents(s3.bucket / "ranges") == contents(local)
    assert [path.name for path in (tmp_path / "third").iterdir()] == ["thesis.tex"]
    with pytest.raises(RecipeError, match="s3://bucket/nowhere"):
        merge("s3://bucket/nowhere", 0.01, tmp_path / "third")
