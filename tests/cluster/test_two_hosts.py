"""Real runs over two hosts, each with its own network and ssh server: started, killed, cut off, told to end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
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
        return ["--run-dir", str(self.folder / name), *more]

    def launch(self, name: str, node: str, *more: str) -> list[str]:
        """`vitscale launch` as one of two nodes."""
        nodes = ["--nodes", "2", "--node-rank", node, "--master", "vnode1:29700"]
        return [*LAUNCH, "recipe.yaml", *nodes, *self.run_of(name, *more)]

    @contextlib.contextmanager
    def launched(self, name: str, *more: str) -> Iterator[list[subprocess.Popen]]:
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(self.start(*self.launch(name, str(node), *more), at=host))
                for node, host in enumerate(two_hosts.HOSTS)
            ]

    def lines(self, name: str) -> dict[int, dict]:
        """Step -> its line of metrics."""
        file = self.folder / name / "metrics.jsonl"
        whole = [line for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
        return {line["step"]: line for line in map(json.loads, whole) if "loss" in line}

    def digests(self, name: str) -> list[str]:
        lines = self.lines(name)
        assert list(lines) == list(range(1, len(lines) + 1))
        return [line["batch_digest"] for line in lines.values()]

    def ends(self, launches: Sequence[subprocess.Popen], within: float = 400) -> tuple[list[int], str]:
        """(exit codes, what they printed together) of launches that end by themselves."""
        shown = "".join(process.communicate(timeout=within)[0] for process in launches)
        print(shown)
        return [process.returncode for process in launches], shown

    def wait_for_step(self, name: str, step: int, process: subprocess.Popen) -> None:
        wait_until(lambda: max(self.lines(name), default=0) >= step or process.poll() is not None, 300)
        assert process.poll() is None, process.communicate()[0]

    def rank_on(self, host: str) -> psutil.Process:
        return min(self.hosts.processes(host, f"{PRETRAIN} --recipe"), key=lambda process: process.create_time())

    def is_empty(self) -> bool:
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
    with place.launched("undisturbed") as launches:
        codes, shown = place.ends(launches)
    assert codes == [0, 0] and "2 ranks on 2 hosts agree" in shown
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


def by_pdsh(place: Place, name: str, *more: str) -> list[str]:
    """The line of cluster/hostfile.md."""
    command = ["cd", str(place.folder), "&&", f"PYTHONPATH={ROOT}", *place.launch(name, "%n", *more)]
    return ["pdsh", "-S", "-R", "ssh", "-w", "vnode1,vnode2", " ".join(command)]


def test_a_launch_on_every_host_by_pdsh(quiet, undisturbed):
    code, shown = quiet.finish(*by_pdsh(quiet, "by-pdsh", "--stop-at", "12"))
    assert code == 0 and "2 ranks on 2 hosts agree" in shown
    assert quiet.digests("by-pdsh") == undisturbed[:12]


def test_a_rank_that_is_killed_on_one_host(quiet, undisturbed):
    with quiet.launched("killed") as launches:
        quiet.wait_for_step("killed", 25, launches[0])
        quiet.rank_on("vnode2").kill()
        codes, shown = quiet.ends(launches)
    assert codes == [0, 0] and "was killed by SIGKILL after step" in shown and "restart in 1 s" in shown
    assert quiet.digests("killed") == undisturbed


def test_a_host_that_dies_is_waited_for(quiet, undisturbed):
    with quiet.launched("dead") as launches:
        quiet.wait_for_step("dead", 25, launches[0])
        for process in quiet.hosts.processes("vnode2"):
            process.kill()
        with quiet.start(*quiet.launch("dead", "1"), at="vnode2") as again:
            codes, shown = quiet.ends([launches[0], again])
    assert codes == [0, 0] and "node 1 (vnode2)" in shown and "resumed from" in shown
    assert quiet.digests("dead") == undisturbed


@pytest.mark.parametrize("host", two_hosts.HOSTS)
def test_a_host_that_is_cut_off_is_named_and_the_other_continues_when_asked(quiet, undisturbed, host):
    name, other = f"without-{host}", next(other for other in two_hosts.HOSTS if other != host)
    with quiet.launched(name, "--set", "check.step_timeout_s=40", "--wait-for-nodes", "0.5") as launches:
        quiet.wait_for_step(name, 25, launches[0])
        quiet.hosts.cut(host)
        codes, shown = quiet.ends(launches, within=500)
    assert codes == [75, 75]  # both notice, each by itself
    # By whoever notices first: the launches, or a rank.
    number = two_hosts.HOSTS.index(host)
    by_any = (f"node {number} ({host}) has not answered", f"rank {number} on {host}", "rank 0, or the machine that it")
    assert any(words in shown for words in by_any)
    assert quiet.is_empty()
    with quiet.start(*LAUNCH, "recipe.yaml", *quiet.run_of(name), at=other) as alone:
        codes, shown = quiet.ends([alone])
    assert codes == [0] and "resumed from" in shown
    assert quiet.digests(name) == undisturbed


def test_a_host_that_is_cut_off_for_a_while_comes_back(quiet, undisturbed):
    with quiet.launched("back", "--set", "check.step_timeout_s=40") as launches:
        quiet.wait_for_step("back", 25, launches[0])
        quiet.hosts.cut("vnode2")
        wait_until(lambda: not any(quiet.hosts.processes(host, PRETRAIN) for host in two_hosts.HOSTS), 120)
        quiet.hosts.mend("vnode2")
        codes, shown = quiet.ends(launches)
    assert codes == [0, 0] and "resumed from" in shown
    assert quiet.digests("back") == undisturbed


def test_one_launch_that_is_told_to_end_ends_both(quiet, undisturbed):
    with quiet.launched("told") as launches:
        quiet.wait_for_step("told", 25, launches[0])
        launches[1].send_signal(signal.SIGTERM)
        codes, _ = quiet.ends(launches, within=200)
    assert codes == [85, 85] and quiet.is_empty()
    with quiet.launched("told") as launches:
        codes, shown = quiet.ends(launches)
    assert codes == [0, 0] and "resumed from" in shown
    assert quiet.digests("told") == undisturbed


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
