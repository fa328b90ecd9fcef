"""Which ends are repeated, how often, what the launch ends with, and what the ends of ranks mean together."""

import itertools
import json
import os
import random
import re
import signal
import threading
from pathlib import Path

import pytest
from processes import signal_when, wait_until
from small_ranks import ranks

from vitscale.ground import errors
from vitscale.ground.errors import PreemptedError
from vitscale.launch import Launch, Supervisor
from vitscale.launch.ends import End, cause

DONE = "note('DONE', '{}')"


def launch(run_dir: Path, *attempts: tuple[str, ...], max_restarts: int = 3, grace_s: float = 0.3, **options):
    """(exit code, attempts) of a launch whose n-th attempt has these bodies; the last one repeats."""
    run_dir.mkdir(exist_ok=True)
    started = []

    def prepare(attempt: int):
        assert attempt == len(started)
        started.append(attempt)
        return ranks(run_dir, *attempts[min(attempt, len(attempts) - 1)])

    with Supervisor(grace_s=grace_s) as supervisor:
        code = Launch(
            run_dir, prepare, supervisor, max_restarts=max_restarts, first_pause_s=options.pop("pause", 0.01), **options
        ).run()
    return code, len(started)


def journal(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "launch.jsonl").read_text().splitlines()]


FAILS, KILLED, SAVES = "sys.exit(75)", "os.kill(os.getpid(), signal.SIGKILL)", "checkpoint({}); sys.exit(75)"


# What the ranks do, attempt by attempt; how many restarts in a row there may be; exit code and number of attempts.
@pytest.mark.parametrize(
    ("attempts", "max_restarts", "code", "count"),
    [
        *(
            ([f"sys.exit({code})"], 1, code, count)
            for code, count in ((1, 2), (2, 1), (3, 1), (4, 1), (75, 2), (85, 1))
        ),
        ([DONE], 1, 0, 1),
        (["pass"], 1, 75, 2),
        (["os.abort()"], 1, 75, 2),
        ([KILLED], 1, 75, 2),
        ([f"{DONE}; os.abort()"], 1, 0, 1),
        ([f"{DONE}; sys.exit(4)"], 1, 0, 1),
        # The survivors of a failed rank do not hide why.
        ([("wait_for('gone'); sys.exit(75)", "note('gone'); time.sleep(0.1); sys.exit(3)")], 3, 3, 1),
        # Restarts are counted until there is a new checkpoint, whole; where none are to be seen, until there are steps.
        ([FAILS], 0, 75, 1),
        ([FAILS], 2, 75, 3),
        ([FAILS, SAVES.format(10), SAVES.format(20), FAILS], 1, 75, 4),
        (["(here / f'checkpoints/step-{time.time_ns()}').mkdir(parents=True); sys.exit(75)"], 1, 75, 2),
        (["beat(5); sys.exit(1)", "beat(9); sys.exit(1)"], 1, 1, 3),
        # What fails twice alike before the first heartbeat would fail again.
        (["sys.exit(1)"], 3, 1, 2),
        (["os.abort()"], 3, 75, 2),
        (["why('a'); sys.exit(1)", "why('b'); sys.exit(1)"], 3, 1, 3),
        (["sys.exit(1)", FAILS, "sys.exit(1)"], 3, 1, 4),
        (["beat(0); sys.exit(1)"], 3, 1, 4),
        ([FAILS], 3, 75, 4),
        ([KILLED], 3, 75, 4),
        (["sys.exit(1)", "os.abort()", DONE], 3, 0, 3),
    ],
)
def test_what_ends_lead_to(tmp_path, attempts, max_restarts, code, count):
    bodies = [(attempt,) if isinstance(attempt, str) else attempt for attempt in attempts]
    assert launch(tmp_path, *bodies, max_restarts=max_restarts) == (code, count)


def test_steps_are_no_progress_where_there_are_checkpoints(tmp_path):
    (tmp_path / "checkpoints/step-00000003").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000003/index.json").touch()
    steps = ["beat(5); sys.exit(1)", "beat(9); sys.exit(1)"]
    assert launch(tmp_path, *((body,) for body in steps), max_restarts=1) == (1, 2)


def test_a_run_that_is_to_stop_early_or_was_done_before(tmp_path):
    assert launch(tmp_path, ("pass",), stops_early=True) == (0, 1)
    assert launch(tmp_path, ("pass", "sys.exit(75)"), stops_early=True, max_restarts=0) == (75, 1)
    (tmp_path / "DONE").write_text("{}")
    assert launch(tmp_path, ("pass",)) == (0, 1)
    assert launch(tmp_path, ("sys.exit(2)",)) == (2, 1)


def test_a_run_that_was_told_to_end_is_not_restarted(tmp_path):
    told = "signal.signal(signal.SIGTERM, lambda *_: sys.exit({})); note('ready'); time.sleep(100)"
    for number, (own, code) in enumerate([(85, 85), (75, 75), (3, 3), (0, 75)]):
        run_dir = tmp_path / str(number)
        threading.Thread(target=signal_when, args=([run_dir / "ready"], signal.SIGTERM), daemon=True).start()
        assert launch(run_dir, (told.format(own),)) == (code, 1)


def test_a_second_signal_ends_ranks_that_ignore_the_first_without_showing_stacks(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("vitscale.launch.supervisor._SAME_REQUEST_SECONDS", 0)
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); note(f'ready-{rank}'); time.sleep(100)"
    arguments = ([tmp_path / "ready-0", tmp_path / "ready-1"], signal.SIGTERM, signal.SIGINT)
    threading.Thread(target=signal_when, args=arguments, daemon=True).start()
    assert launch(tmp_path, (body, body)) == (75, 1)
    ends = [line["returncode"] for line in journal(tmp_path) if line["event"] == "rank ended"]
    assert ends == [-signal.SIGKILL] * 2 and "most recent call first" not in capfd.readouterr().err


def test_a_pause_ends_when_told_to(tmp_path):
    def tell() -> None:
        file = tmp_path / "launch.jsonl"
        wait_until(lambda: file.exists() and journal(tmp_path)[-1]["event"] == "restart")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    code, _ = launch(tmp_path, ("sys.exit(75)",), pause=60)
    assert code == 85
    assert [line["event"] for line in journal(tmp_path)] == ["started", "rank ended", "restart", "finished"]


def test_pauses_grow(tmp_path):
    launch(tmp_path, ("sys.exit(75)",), max_restarts=3)
    assert [line["pause_s"] for line in journal(tmp_path) if line["event"] == "restart"] == [0.01, 0.02, 0.04]


def test_the_journal_tells_the_story(tmp_path, capfd):
    survivor, killed = "wait_for('gone'); beat(3); sys.exit(75)", "beat(4); note('gone'); os.kill(os.getpid(), 9)"
    launch(tmp_path, (survivor, killed), (DONE,), grace_s=10)
    lines, shown = journal(tmp_path), capfd.readouterr().err
    assert re.search(r"launch: rank 1 \(pid \d+\) was killed by SIGKILL after step 4 \(training\), on ", shown)
    assert "rank 0" in shown and "exit code 75 (to be repeated) after step 3" in shown
    assert [line["event"] for line in lines] == [
        *("started", "rank ended", "rank ended", "restart", "started", "rank ended", "finished")
    ]
    assert [line["attempt"] for line in lines] == [1, 1, 1, 1, 2, 2, 2]
    assert lines[0]["world_size"] == 2 and lines[4]["world_size"] == 1
    assert {(line["rank"], line["returncode"], line["step"]) for line in lines[1:3]} == {(0, 75, 3), (1, -9, 4)}
    assert "rank 1" in lines[3]["cause"] and "SIGKILL" in lines[3]["cause"] and lines[3]["step"] == 4
    assert lines[-1]["exit_code"] == 0
    launch(tmp_path, ("pass",))
    assert journal(tmp_path)[: len(lines)] == lines


def test_a_journal_that_cannot_be_written_stops_nothing(tmp_path, capfd):
    (tmp_path / "launch.jsonl").mkdir()
    assert launch(tmp_path, ("sys.exit(75)",), (DONE,)) == (0, 2)
    assert capfd.readouterr().err.count("cannot be written") == 1


def test_what_cannot_be_prepared_is_the_end_and_is_written_down(tmp_path):
    def prepare(attempt: int):
        if attempt:
            raise PreemptedError("the time is up")
        return ranks(tmp_path, "sys.exit(75)")

    with Supervisor() as supervisor, pytest.raises(PreemptedError):
        Launch(tmp_path, prepare, supervisor, first_pause_s=0.01).run()
    assert (journal(tmp_path)[-1]["event"], journal(tmp_path)[-1]["exit_code"]) == ("finished", 85)


def end(rank: int, returncode: int, **more) -> End:
    return End(rank, 1000 + rank, returncode, 5, "after step 5 (training)", **more)


HUNG = {"was_killed": True, "hung": "gave no sign of life for 61 s (its process: stopped, T)"}
# In the order in which they explain the others: what goes wrong by itself, then silence, then what follows from a peer.
CLASSES = [
    [end(0, 1), end(1, 2), end(2, 3), end(3, 4), end(4, -signal.SIGKILL), end(5, 130)],
    [end(6, -signal.SIGKILL, **HUNG)],
    [end(7, 75)],
    [end(8, -signal.SIGKILL, was_killed=True)],
]


@pytest.mark.parametrize("seed", range(20))
def test_the_cause_is_the_earliest_end_that_is_no_consequence(seed):
    chosen = random.Random(seed)
    all_ends = [*itertools.chain(*CLASSES), end(9, 0), end(10, 85)]
    ends = chosen.sample(all_ends, k=chosen.randint(1, len(all_ends)))
    bad = [[one for one in ends if one in group] for group in CLASSES]
    assert cause(ends) == next((group[0] for group in bad if group), None)


def test_good_ends_have_no_cause():
    assert cause([]) is None
    assert cause([end(0, 0), end(1, 85), end(2, -signal.SIGTERM, was_told=True)]) is None


@pytest.mark.parametrize(
    ("returncode", "code"), [(1, 1), (2, 2), (3, 3), (4, 4), (75, 75), (-9, 75), (-64, 75), (130, 1), (120, 1)]
)
def test_the_code_of_a_launch_that_ends_for_it(returncode, code):
    assert end(0, returncode).code == code


def test_every_code_of_an_error_has_a_meaning():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 5
    for kind in kinds:
        assert "unknown" not in end(0, kind.exit_code).describe()
