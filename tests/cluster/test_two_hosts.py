"""Real runs over two hosts, each with its own network and ssh server: started, killed, cut off, told to end."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import two_hosts
import yaml
from processes import started, wait_until
from training.ranks import make_data, make_recipe
from two_hosts import TwoHosts

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = str(ROOT / "vitscale" / "pretrain.py")
LAUNCH = [sys.executable, "-m", "vitscale", "launch"]
STEPS = 80
SAVED_EVERY = 10


class Place:
    """A folder that both hosts see, with data, a recipe, a file of hosts and runs."""

    def __init__(self, folder: Path, hosts: TwoHosts) -> None:
        self.folder, self.hosts = folder, hosts
        make_data(folder)
        recipe = make_recipe(
            folder,
            schedule={"duration": {"steps": STEPS}, "warmup": {"steps": 2}},
            checkpoint={"every": {"steps": SAVED_EVERY}},
            check={"step_timeout_s": 120},
        )
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.dump()))
        (folder / "hosts").write_text("vnode1 slots=1\nvnode2 slots=1\n")
        # DeepSpeed gives these to the ranks on all hosts.
        (folder / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nCUDA_VISIBLE_DEVICES=\n")

    def environment(self) -> dict[str, str]:
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": programs}

    def start(self, *command: str, at: str = "front"):
        """To be used with `with`."""
        return started(
            self.hosts.command(list(command), at),
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def finish(self, *command: str, within: float = 400) -> tuple[int, str]:
        """(exit code, what it printed) of a command that ends by itself."""
        with self.start(*command) as process:
            shown = process.communicate(timeout=within)[0]
        print(shown)
        return process.returncode, shown

    def run_of(self, name: str, *more: str) -> list[str]:
        """Arguments of a run."""
        return ["--run-dir", str(self.folder / name), *more]

    def launch(self, name: str, *more: str) -> list[str]:
        """`vitscale launch` over both hosts."""
        return [*LAUNCH, str(self.folder / "recipe.yaml"), "--hostfile", "hosts", *self.run_of(name, *more)]

    def lines(self, name: str) -> dict[int, dict]:
        """Step -> its line of metrics."""
        file = self.folder / name / "metrics.jsonl"
        whole = [line for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
        return {line["step"]: line for line in map(json.loads, whole) if "loss" in line}

    def digests(self, name: str) -> list[str]:
        """Of the pictures of every step."""
        lines = self.lines(name)
        assert list(lines) == list(range(1, len(lines) + 1))
        return [line["batch_digest"] for line in lines.values()]

    def wait_for_step(self, name: str, step: int, process: subprocess.Popen) -> None:
        """Until the run has come so far."""
        wait_until(lambda: max(self.lines(name), default=0) >= step or process.poll() is not None, 300)
        assert process.poll() is None, process.communicate()[0]

    def rank_on(self, host: str) -> psutil.Process:
        """The process of the one rank there."""
        return min(self.hosts.processes(host, f"{PRETRAIN} --recipe"), key=lambda process: process.create_time())

    def is_empty(self) -> bool:
        """Whether nothing of a run is left on the hosts."""
        return not any(self.hosts.processes(host) for host in two_hosts.HOSTS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if why := two_hosts.why_not():
        pytest.skip(why)
    with two_hosts.two_hosts() as hosts:
        yield Place(tmp_path_factory.mktemp("shared"), hosts)


@pytest.fixture
def quiet(place: Place) -> Iterator[Place]:
    """Both hosts on the network, and nothing left on them afterwards."""
    yield place
    for host in two_hosts.HOSTS:
        place.hosts.mend(host)
    wait_until(place.is_empty, 60)


@pytest.fixture(scope="module")
def undisturbed(place: Place) -> list[str]:
    """Digests of a run that nothing happens to."""
    code, shown = place.finish(*place.launch("undisturbed"))
    assert code == 0 and "2 ranks on 2 hosts agree" in shown
    digests = place.digests("undisturbed")
    assert len(digests) == STEPS
    return digests


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_s_own_launcher(quiet, undisturbed, stage):
    script = [PRETRAIN, "--recipe", "recipe.yaml", "--set", f"parallelism.zero_stage={stage}", "--stop-at", "12"]
    code, shown = quiet.finish("deepspeed", "--hostfile", "hosts", *script, *quiet.run_of(f"zero-{stage}"))
    assert code == 0 and "2 ranks on 2 hosts agree" in shown
    assert quiet.digests(f"zero-{stage}") == undisturbed[:12]


def test_deepspeed_without_its_hostfile_does_not_train_on_one_host(quiet):
    script = [PRETRAIN, "--recipe", "recipe.yaml", *quiet.run_of("alone")]
    code, shown = quiet.finish("deepspeed", "--num_accelerators", "1", "--hostfile", "hots", *script)
    assert code == 2 and "--hostfile hots" in shown
    assert not (quiet.folder / "alone").exists()


def test_a_rank_that_is_killed_on_one_host(quiet, undisturbed):
    with quiet.start(*quiet.launch("killed")) as process:
        quiet.wait_for_step("killed", 25, process)
        quiet.rank_on("vnode2").kill()
        shown = process.communicate(timeout=400)[0]
    print(shown)
    assert process.returncode == 0 and "was killed by SIGKILL after step" in shown and "restart in 1 s" in shown
    assert quiet.digests("killed") == undisturbed


@pytest.mark.parametrize("host", two_hosts.HOSTS)
def test_a_host_that_is_cut_off_is_named_and_the_other_continues_when_asked(quiet, undisturbed, host):
    name, other = f"without-{host}", next(other for other in two_hosts.HOSTS if other != host)
    with quiet.start(*quiet.launch(name, "--set", "check.step_timeout_s=40")) as process:
        quiet.wait_for_step(name, 25, process)
        quiet.hosts.cut(host)
        # Both ends notice, each by itself.
        wait_until(lambda: not quiet.hosts.processes(host, PRETRAIN), 120)
        shown = process.communicate(timeout=500)[0]
    print(shown)
    assert process.returncode == 75
    # By whoever notices first: the launches, or a rank.
    number = two_hosts.HOSTS.index(host)
    by_any = (f"node {number} ({host}) has not answered", f"rank {number} on {host}", "rank 0, or the machine that it")
    assert any(words in shown for words in by_any)
    wait_until(quiet.is_empty, 60)
    (quiet.folder / "hosts-left").write_text(f"{other} slots=1\n")
    code, shown = quiet.finish(*quiet.launch(name, "--hostfile", "hosts-left"))
    assert code == 0 and "resumed from" in shown
    assert quiet.digests(name) == undisturbed


def test_the_front_is_told_to_end(quiet, undisturbed):
    with quiet.start(*quiet.launch("told")) as process:
        quiet.wait_for_step("told", 25, process)
        process.send_signal(signal.SIGTERM)
        shown = process.communicate(timeout=200)[0]
    print(shown)
    assert process.returncode == 85 and quiet.is_empty()
    code, shown = quiet.finish(*quiet.launch("told"))
    assert code == 0 and "resumed from" in shown
    assert quiet.digests("told") == undisturbed


def test_nothing_outlives_the_front(quiet):
    with quiet.start(*quiet.launch("abandoned")) as process:
        quiet.wait_for_step("abandoned", 5, process)
        process.kill()
        wait_until(quiet.is_empty, 30)


def test_hosts_that_cannot_take_part_are_named_before_anything_starts(quiet):
    (quiet.folder / "more-hosts").write_text("vnode1 slots=1\nvnode2 slots=1\nvnode3 slots=2\n")
    command = [*LAUNCH, "recipe.yaml", "--hostfile", "more-hosts", *quiet.run_of("never")]
    code, shown = quiet.finish(*command)
    assert code == 2 and "vnode3:" in shown and "ssh: Could not resolve hostname" in shown
    assert "vnode2: " not in shown
    assert list((quiet.folder / "never").iterdir()) == []


def test_a_run_directory_that_the_hosts_do_not_share_is_refused(quiet):
    private = quiet.folder / "private"
    private.mkdir()
    server = (quiet.hosts.folder / "vnode2.pid").read_text().strip()
    inside = ["nsenter", "--target", server, "--mount"]
    subprocess.run([*inside, "mount", "-t", "tmpfs", "none", str(private)], check=True)
    try:
        code, shown = quiet.finish(*quiet.launch("private/run"))
    finally:
        subprocess.run([*inside, "umount", str(private)], check=True)
    assert code == 2 and re.search(rf"vnode2: .* {private / 'run'}", shown)


def test_a_launch_on_every_host_by_hand(quiet, undisturbed):
    nodes = ["--nodes", "2", "--master", "vnode1:29700"]
    command = [*LAUNCH, "recipe.yaml", *quiet.run_of("by-hand", "--stop-at", "12"), *nodes, "--node-rank"]
    with quiet.start(*command, "1", at="vnode2") as second, quiet.start(*command, "0", at="vnode1") as first:
        shown = [process.communicate(timeout=400)[0] for process in (first, second)]
    print(*shown)
    assert (first.returncode, second.returncode) == (0, 0)
    assert quiet.digests("by-hand") == undisturbed[:12]


def test_torchrun_goes_on_with_the_host_that_is_left(quiet, undisturbed):
    elastic = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "elastic"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "vnode1:29400"]
    command = ["torchrun", *elastic, *meeting, PRETRAIN, "--recipe", "recipe.yaml", *quiet.run_of("elastic")]
    with quiet.start(*command, at="vnode1") as first, quiet.start(*command, at="vnode2") as second:
        quiet.wait_for_step("elastic", 25, first)
        for process in quiet.hosts.processes("vnode2"):
            process.kill()
        second.communicate(timeout=60)
        shown = first.communicate(timeout=400)[0]
    print(shown)
    assert first.returncode == 0 and "2 ranks on 2 hosts agree" in shown and "1 rank on 1 host ready" in shown
    assert quiet.digests("elastic") == undisturbed
