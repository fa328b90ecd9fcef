"""Launches of several nodes, here processes of one: they meet, fail, are killed and told to end together."""

import json
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from launch.small_cluster import DONE, FOREVER, Cluster, ends
from processes import is_alive, wait_until

from vitscale.ground.errors import PeerLostError
from vitscale.launch import FirstNode, Supervisor, ThisNode, fitting


@pytest.fixture
def cluster(tmp_path):
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)


def test_ranks_are_numbered_over_all_nodes_and_meet_at_one_port(cluster):
    body = "note(f'rank-{rank}', os.environ['WORLD_SIZE'] + ' ' + os.environ['MASTER_PORT']); " + DONE
    codes = ends(cluster.start(1, body), cluster.start(0, body, ranks=2))
    assert [code for code, _ in codes] == [0, 0]
    met = {(cluster.run_dir / f"rank-{rank}").read_text() for rank in range(3)}
    assert len(met) == 1 and met.pop().startswith("3 ")
    assert [event["world_size"] for event in cluster.events("started")] == [3, 3]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_ends_those_of_all_nodes_and_all_are_restarted(cluster, failing):
    fails = "wait_for('waits'); os.kill(os.getpid(), signal.SIGKILL)"
    waits = "note('waits'); time.sleep(100)"
    first = cluster.start(0, fails if failing == 0 else waits, DONE)
    second = cluster.start(1, fails if failing == 1 else waits, DONE)
    (code, shown), (code_2, shown_2) = ends(first, second)
    assert (code, code_2) == (0, 0)
    other = shown_2 if failing == 0 else shown
    assert f"rank {failing} (pid" in other and "s to end by themselves" in other
    assert all("SIGKILL" in event["cause"] for event in cluster.events("restart"))
    assert len(cluster.events("restart")) == 2


def test_what_a_repetition_does_not_mend_ends_all_nodes(cluster):
    survivor = "wait_for('gone'); sys.exit(75)"
    codes = ends(cluster.start(0, survivor), cluster.start(1, "note('gone'); sys.exit(3)"))
    assert [code for code, _ in codes] == [3, 3]
    assert all("rank 1" in shown and "data or checkpoint" in shown for _, shown in codes)


def test_restarts_in_a_row_are_counted_once_for_all_nodes(cluster):
    codes = ends(cluster.start(0, "beat(1); sys.exit(1)"), cluster.start(1, "sys.exit(75)"))
    assert [code for code, _ in codes] == [1, 1]
    assert len(cluster.events("started")) == 2 * 3


@pytest.mark.parametrize("told", [0, 1])
def test_a_launch_told_to_end_while_it_waits_ends_the_others(tmp_path, told):
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, nodes=3)
        launches = [cluster.start(0, DONE), cluster.start(1, DONE)]
        assert any("node 1 of 3 is there" in line for line in launches[0].stderr)
        launches[told].send_signal(signal.SIGTERM)
        assert [code for code, _ in ends(*launches)] == [85, 85]


def test_ranks_that_save_on_one_node_s_signal_end_all_nodes(cluster):
    saves = (
        "signal.signal(signal.SIGTERM, lambda *_: note('told'))\n"
        "note(f'ready-{rank}'); wait_for('told'); note(f'saved-{rank}'); sys.exit(85)"
    )
    launches = [cluster.start(0, saves), cluster.start(1, saves)]
    wait_until(lambda: all((cluster.run_dir / f"ready-{rank}").exists() for rank in (0, 1)))
    launches[1].send_signal(signal.SIGTERM)
    assert [code for code, _ in ends(*launches)] == [85, 85]


@pytest.mark.parametrize("replaced", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_launch_that_is_killed_and_started_anew_joins_the_others(cluster, replaced):
    bodies = (FOREVER, DONE)
    launches = [cluster.start(0, *bodies), cluster.start(1, *bodies)]
    wait_until(lambda: len(cluster.pids()) == 2)
    launches[replaced].kill()
    launches[replaced].wait()
    launches[replaced] = cluster.start(replaced, DONE)
    codes = ends(*launches)
    assert [code for code, _ in codes] == [0, 0]
    # "has closed the connection", or "can no longer be reached" where it had something left to read.
    assert re.search(rf"node {replaced} \(.*\) (has closed|can no longer)", codes[1 - replaced][1])
    assert not any(is_alive(pid) for pid in cluster.pids())


@pytest.mark.parametrize("silent", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_node_that_falls_silent_is_lost_and_may_come_again(cluster, silent):
    launches = [cluster.start(0, FOREVER, DONE), cluster.start(1, FOREVER, DONE)]
    wait_until(lambda: len(cluster.pids()) == 2)
    launches[silent].send_signal(signal.SIGSTOP)
    assert any("has not answered for" in line for line in launches[1 - silent].stderr)
    launches[silent].send_signal(signal.SIGCONT)
    assert [code for code, _ in ends(*launches)] == [0, 0]


def test_a_node_that_never_comes_is_named(cluster):
    [(code, shown)] = ends(cluster.start(0, DONE, wait=0.5))
    assert code == 75 and "node 1 of 2 " in shown
    [(code, shown)] = ends(cluster.start(1, DONE, wait=0.5))
    assert code == 75 and "node 0" in shown and "Connection refused" in shown


def test_launches_that_do_not_belong_together_are_refused(cluster):
    first = cluster.start(0, FOREVER)
    [(code, shown)] = ends(cluster.start(1, DONE, nodes=3))
    assert code == 2 and "node 1 of 3" in shown and "one of 2" in shown
    cluster.start(1, FOREVER)
    wait_until(lambda: len(cluster.pids()) == 2)
    [(code, shown)] = ends(cluster.start(1, DONE))
    assert code == 2 and "node 1 is already" in shown
    [(code, shown)] = ends(cluster.start(0, DONE))
    assert code == 2 and "cannot listen" in shown
    first.kill()


@pytest.mark.parametrize(
    ("devices", "batch", "ranks"),
    [
        ([8, 8], 4096, [8, 8]),
        ([8, 7], 4096, [4, 4]),  # not 15, 14, 12 or 10
        ([8, 1], 90, [8, 1]),
        ([8, 2], 90, [8, 2]),
        ([8, 8, 8], 4096, [8, 8, 8]),  # three nodes never divide it: the recipe's own error says so
        ([8, 7], None, [8, 7]),
    ],
)
def test_ranks_of_several_nodes_divide_the_batch_together(devices, batch, ranks):
    assert fitting(devices, batch) == ranks


def test_a_name_that_nobody_knows_is_waited_for_as_nodes_are(tmp_path):
    with Supervisor() as supervisor:
        with pytest.raises(PeerLostError, match=r"node-0\.invalid"):
            FirstNode(ThisNode(0, 2, "node-0.invalid", wait_s=0.1), None, supervisor, tmp_path)
        supervisor.told = signal.SIGTERM
        first = FirstNode(ThisNode(0, 2, "node-0.invalid"), None, supervisor, tmp_path)
        assert first.meet(1, is_asked_for=True) is None


def test_more_nodes_than_files_that_may_be_open_meet_and_end_together():
    program = Path(__file__).parents[2] / "benchmarks" / "many_nodes.py"
    options = ["--json", "--nodes", "100", "--open-files", "64", "--doubled", "4", "--slow", "4", "--silence", "10"]
    result = subprocess.run([sys.executable, program, *options], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["world_size"] == 800 and found["accounts"] == 100 and found["refused"] == 4
    assert found["lost"] >= 1 and found["trouble"]
    assert found["decided"] + found["lost"] >= 99
