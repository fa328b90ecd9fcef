"""What would run where, told without running it; and the far end of a connection."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from messages import refusal
from processes import is_alive, started, wait_until

import vitscale
from vitscale.ground.errors import RecipeError
from vitscale.launch import Pretraining
from vitscale.launch.clusters import Job, find_cluster, launch_command
from vitscale.launch.clusters.hostfile import Host, read_hostfile

ROOT = Path(vitscale.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def hostfile(folder: Path, text: str) -> Path:
    (folder / "hosts").write_text(text)
    return folder / "hosts"


def test_a_hostfile_is_deepspeed_s(tmp_path):
    """Read by DeepSpeed itself as well."""
    from deepspeed.launcher.runner import fetch_hostfile

    path = hostfile(
        tmp_path, "# the first rack\nnode-1.rack slots=8\n\n  node_2   slots=4  # two are broken\n10.0.0.3 slots=1\n"
    )
    hosts = read_hostfile(path)
    assert hosts == [Host("node-1.rack", 8), Host("node_2", 4), Host("10.0.0.3", 1)]
    assert dict(fetch_hostfile(str(path))) == dict(hosts)


@pytest.mark.parametrize(
    "text",
    [
        "a slots=1\nb slots\n",
        "a 8\n",
        "a slots=8 extra\n",
        "-oProxyCommand=x slots=8\n",
        "me@a slots=8\n",
        "a slots=1\n\nb slots=0\n",
        "a slots=1\nb slots=1\na slots=2\n",
        "a slots=1\nlocalhost slots=1\n",
        "127.0.0.1 slots=1\nb slots=1\n",
        "# nobody\n",
        "\udcff",
    ],
)
def test_a_line_that_is_wrong_is_told_with_its_number(tmp_path, text):
    (tmp_path / "hosts").write_bytes(text.encode(errors="surrogateescape"))
    with refusal(RecipeError, "launch", repr(text), {tmp_path: "FOLDER"}):
        read_hostfile(tmp_path / "hosts")


def test_a_missing_hostfile(tmp_path):
    with pytest.raises(RecipeError, match=r"hosts"):
        read_hostfile(tmp_path / "hosts")


def render(cluster: str, *, options: dict[str, str] | None = None, **job) -> list[str]:
    what = Pretraining("h14_jft", ("seed=3",), Path("runs/x y"), ranks=job.pop("ranks", None), stop_at=7)
    return find_cluster(cluster).render(Job(what, options=options or {}, **job)).splitlines()


def test_local_shows_the_command_of_every_rank():
    lines = [shlex.split(line) for line in render("local", ranks=2, nodes=2, node_rank=1, master="a")[1:]]
    assert [line[: line.index(sys.executable)] for line in lines] == [
        ["WORLD_SIZE=4", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=a", "MASTER_PORT=PORT", f"RANK={2 + i}", f"LOCAL_RANK={i}"]
        for i in (0, 1)
    ]
    assert all(line[-6:] == ["--resume", "auto", "--set", "seed=3", "--stop-at", "7"] for line in lines)


def test_hostfile_shows_the_ssh_and_the_command_of_every_host(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nobody's business")
    options = {"hostfile": str(hostfile(tmp_path, "a slots=8\nb slots=8\n")), "ssh": "ssh -p 2222"}
    lines = render("hostfile", options=options, master="a-ib:4000")
    assert lines[0].startswith("# node 0 of 2: ssh -p 2222 -T") and lines[2].startswith("# node 1 of 2")
    for node, line in enumerate((lines[1], lines[3])):
        words = shlex.split(line)
        assert words[:3] == ["cd", str(Path.cwd()), "&&"] and "NCCL_DEBUG=INFO" in words
        command = words[words.index("launch") :]
        assert command[:8] == ["launch", "h14_jft", "--nodes", "2", "--node-rank", str(node), "--master", "a-ib:4000"]
        assert command[command.index("--ranks") + 1] == "8" and command[command.index("--run-dir") + 1] == "runs/x y"
    assert "business" not in "".join(lines)


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("a slots=8\n", {"nodes": 2}),
        ("a slots=8\nb slots=4\n", {"ranks": 8}),
        ("a slots=8\nb slots=4\n", {}),
        ("a slots=8\n", {"node_rank": 0}),
        ("a slots=8\n", {"options": {"shh": "x"}}),
    ],
)
def test_a_job_that_does_not_fit_its_hosts_is_refused(tmp_path, text, job):
    path = str(hostfile(tmp_path, text))
    with refusal(RecipeError, "launch", f"{text!r} {job}", {tmp_path: "FOLDER"}):
        render("hostfile", **{**job, "options": {"hostfile": path, **job.get("options", {})}})


def test_the_command_for_other_nodes_is_understood(tmp_path):
    """By the command line itself: what it would run there is what was asked for here."""
    what = Pretraining("h14_jft", ("seed=3",), Path("runs/x"), 2, "never", time_limit_minutes=5, stop_at=7, smoke=True)
    command = launch_command(Job(what), [sys.executable, "-m", "vitscale"], nodes=3, node_rank="2", master="a:7")
    shown = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout
    last = shlex.split(shown.splitlines()[-1])
    assert {"WORLD_SIZE=6", "RANK=5", "MASTER_ADDR=a"} <= set(last)
    script = last[last.index("--recipe") :]
    expected = "--recipe h14_jft --run-dir runs/x --resume never --set seed=3 --smoke --stop-at 7 --time-limit"
    assert " ".join(script[:-1]) == expected


FAR_END = [sys.executable, "-m", "vitscale.launch.remote_shell"]
CHILD = (
    "import os, signal, sys, time; from pathlib import Path\n"
    "assert signal.signal(signal.SIGTERM, lambda *_: sys.exit(85)) == signal.SIG_DFL\n"
    "Path('part').write_text(f'{os.getpid()} ' + os.environ['GREETING']); os.rename('part', 'pid'); time.sleep(100)"
)


def far_end(folder: Path):
    process = started(FAR_END, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    start = {"folder": str(folder), "environment": {"GREETING": "hello"}, "command": [sys.executable, "-c", CHILD]}
    return process, json.dumps(start) + "\n"


def test_the_far_end_passes_signals_on_and_the_exit_code_back(tmp_path):
    process, start = far_end(tmp_path)
    with process as far:
        far.stdin.write(start + "{}\n")
        far.stdin.flush()
        wait_until((tmp_path / "pid").exists)
        assert (tmp_path / "pid").read_text().split()[1] == "hello"
        far.send_signal(signal.SIGTERM)  # not the connection's end, hence nothing
        far.stdin.write('{"signal": "SIGTERM"}\n')
        far.stdin.flush()
        assert far.wait(20) == 85


def test_the_far_end_kills_what_it_runs_when_the_connection_ends(tmp_path):
    process, start = far_end(tmp_path)
    with process as far:
        far.stdin.write(start)
        far.stdin.flush()
        wait_until((tmp_path / "pid").exists)
        _, shown = far.communicate(timeout=20)
        assert far.returncode == 75 and "the connection to the front has ended" in shown
    wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text().split()[0])))


@pytest.mark.parametrize(
    ("cluster", "options", "run_dir"),
    [
        ("slurm", {"python": 'apptainer exec "a b'}, "run"),
        ("slurm", {"srun": "--x='"}, "run"),
        ("slurm", {}, "a\nrm -rf b"),
    ],
)
def test_what_would_be_other_words_or_lines_is_refused(cluster, options, run_dir):
    what = Pretraining("h14_jft", ranks=1, run_dir=Path(run_dir), smoke=True)
    with refusal(RecipeError, "launch", f"{cluster} {options} {run_dir!r}", {Path.cwd(): "HERE"}):
        find_cluster(cluster).render(Job(what, options=options))
