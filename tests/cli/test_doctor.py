"""`vitscale doctor` here, and where something is wrong: few open files, a killed build, packages that do not fit."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from commands import command

from vitscale.ground.machine import cores_near, cpu_quota, usable_cores

COMMAND = (
    "import sys; sys.argv = ['vitscale', 'doctor', *sys.argv[1:]]; from vitscale.cli.entry import vitscale; vitscale()"
)


def examined(*arguments: object, prepare=None, **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    command = [sys.executable, "-c", COMMAND, *map(str, arguments), "--json"]
    environment = os.environ | variables
    result = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=prepare, check=False)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, {finding["what"]: finding for finding in json.loads(result.stdout)}


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))


def test_what_is_wrong_is_named_with_what_mends_it(tmp_path):
    lock = tmp_path / "extensions" / "operator" / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("")
    os.utime(lock, (0, 0))
    code, found = examined(
        *("--folder", tmp_path / "not" / "yet"),
        prepare=few_files,
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
        OMP_NUM_THREADS="1",
    )
    assert code == 2
    assert found["build lock"]["state"] == "stops" and str(lock) in found["build lock"]["mend"]
    assert found["open files"]["state"] == "slows" and "512" in found["open files"]["mend"]
    assert str(tmp_path) in found["run folder"]["found"] and "OMP_NUM_THREADS=1" in found["variables"]["found"]
    for what in ("packages", "decoder"):
        assert found[what]["state"] == "good" and found[what]["mend"] is None
    assert str(len(os.sched_getaffinity(0))) in found["cores"]["found"]


def test_a_torch_that_cannot_be_loaded_hides_nothing_else(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99: cannot open shared object file')")
    stale = tmp_path / "xxhash-0.1.dist-info"
    stale.mkdir()
    (stale / "METADATA").write_text("Metadata-Version: 2.1\nName: xxhash\nVersion: 0.1\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, found = examined(PYTHONPATH=path)
    assert code == 2
    assert found["torch"]["state"] == "stops" and "libcudart.so.99" in found["torch"]["found"]
    assert found["packages"]["state"] == "stops" and "xxhash 0.1" in found["packages"]["found"]
    assert found["packages"]["mend"].startswith("pip install 'xxhash>=")
    assert found["decoder"]["state"] == "good"


def test_cores_near_a_device(tmp_path: Path):
    bound = os.sched_getaffinity(0)
    device, node = tmp_path / "sys/bus/pci/devices/0000:1b:00.0", tmp_path / "sys/devices/system/node/node1"
    device.mkdir(parents=True)
    node.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    one = min(bound)
    for cores, expected in ((f"{one}", {one}), (f"{one}-{one},9000-9003\n", {one}), ("9000-9003", bound), ("", bound)):
        (node / "cpulist").write_text(cores)
        assert cores_near("0000:1b:00.0", tmp_path) == expected
    (device / "numa_node").write_text("-1\n")
    assert cores_near("0000:1b:00.0", tmp_path) == cores_near("0000:1c:00.0", tmp_path) == bound


def test_cores_that_a_control_group_grants(tmp_path: Path):
    files = {
        "proc/self/cgroup": "0::/pod/run\n",
        "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/pod/run/cpu.max": "max 100000\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cpu_quota(tmp_path) == 1.5 and usable_cores(tmp_path) == 1
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/old\n")
    old = tmp_path / "sys/fs/cgroup/cpu/old"
    old.mkdir(parents=True)
    (old / "cpu.cfs_period_us").write_text("100000\n")
    (old / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota(tmp_path) is None
    (old / "cpu.cfs_quota_us").write_text("400000\n")
    assert cpu_quota(tmp_path) == 4
    assert cpu_quota(tmp_path / "nothing") is None
    assert usable_cores(tmp_path / "nothing") == len(os.sched_getaffinity(0)) >= usable_cores(tmp_path)


@pytest.mark.parametrize(("said", "told"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE")])
def test_idle_threads_sleep_unless_people_said(said, told):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    line = [sys.executable, "-c", "from vitscale.ground.machine import share_cores; share_cores(); import torch"]
    done = subprocess.run(line, env={**environment, **said, "OMP_DISPLAY_ENV": "TRUE"}, capture_output=True, text=True)
    assert f"OMP_WAIT_POLICY = '{told}'" in done.stderr


def test_a_file_is_no_folder_for_runs(tmp_path):
    (tmp_path / "file").write_text("")
    ended = command("doctor", "--folder", tmp_path / "file" / "runs", "--json")
    (found,) = [finding for finding in json.loads(ended.stdout) if finding["what"] == "run folder"]
    assert ended.returncode == 2 and found["state"] == "stops"
