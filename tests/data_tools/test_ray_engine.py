"""The Ray engine on a cluster of this machine: equal bytes, whatever happens to its workers."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from datasets_on_disk import contents, run, run_here, start
from small_files import write_files

from data_tools.conversion import convert
from data_tools.machine import Machine
from data_tools.request import Request

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
OPTIONS = ("--shard-samples", 4, "--workers", 2, "--engine", "ray")


@pytest.fixture
def environment():
    """Without an address: a cluster is started."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def descendants(process: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Process ids below a process, with their titles."""
    psutil = pytest.importorskip("psutil")
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            found.append((child.pid, " ".join(child.cmdline())))
        except psutil.Error:
            continue
    return found


def test_without_ray_one_is_told_what_to_install(image_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    done = run_here(image_folder, tmp_path / "out", *OPTIONS)
    assert done.exit_code == 2 and "pip install ray" in done.stderr
    assert done.stderr.count("\n") == 1


@needs_ray
def test_an_address_of_no_cluster_is_told_at_once(image_folder, tmp_path, environment):
    done = run(image_folder, tmp_path / "out", *OPTIONS, env={**environment, "RAY_ADDRESS": "127.0.0.1:1"})
    assert done.returncode == 2 and "RAY_ADDRESS=127.0.0.1:1" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@needs_ray
def test_equal_bytes_and_no_word_of_ray(image_folder, local, tmp_path, environment):
    done = run(image_folder, tmp_path / "out", *OPTIONS, env=environment)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == contents(local)
    assert done.stderr == "" and "ray" not in done.stdout.replace(str(tmp_path), "").lower()


@pytest.mark.slow
@needs_ray
def test_a_worker_that_is_killed_costs_nothing(photos, tmp_path, environment):
    source = write_files(tmp_path / "images", *((f"cat/{i:04d}.jpg", photos[i % len(photos)]) for i in range(3000)))
    convert(Request(str(source), shard_samples=500), tmp_path / "local", Machine(workers=2))
    options = "--shard-samples", 500, "--workers", 2, "--engine", "ray"
    process = start(source, tmp_path / "out", *options, env=environment)
    killed: set[int] = set()
    while process.poll() is None and len(killed) < 2:
        writing = list((tmp_path / "out").glob(".shard-*.part"))
        for pid, title in descendants(process) if writing else []:
            if title.startswith("ray::_perform") and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                break
        time.sleep(0.02)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert killed
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


@pytest.mark.slow
@needs_ray
def test_errors_that_people_mend_come_back_as_one_line(image_folder, tmp_path, environment):
    # A folder in the place of a shard: what no permission can hide from root either.
    out = tmp_path / "out"
    assert run(image_folder, out, *OPTIONS[:4], "--task-range", "0/2").returncode == 0
    (out / "shard-00003.beton").mkdir()
    (out / "shard-00003.beton" / "mine").write_text("")
    done = run(image_folder, out, *OPTIONS, env=environment)
    assert done.returncode == 3 and "shard-00003.beton" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


@pytest.mark.slow
@needs_ray
def test_ctrl_c_ends_it_and_leaves_nothing_running(image_folder, local, tmp_path, environment):
    process = start(image_folder, tmp_path / "out", *OPTIONS, env=environment)
    end = time.monotonic() + 60
    while not any("raylet" in title for _, title in descendants(process)) and time.monotonic() < end:
        time.sleep(0.05)
    below = descendants(process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors, errors
    end = time.monotonic() + 120  # Ray's agent looks for its parent now and then
    while any(Path(f"/proc/{pid}").exists() for pid, _ in below) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [title for pid, title in below if Path(f"/proc/{pid}").exists()]
    done = run(image_folder, tmp_path / "out", *OPTIONS[:4])
    assert done.returncode == 0 and contents(tmp_path / "out") == contents(local)
