"""Which ends are repeated, how often, and what the launch ends with."""

import json
import signal
import threading
import time
from pathlib import Path

import pytest
from processes import signal_when
from small_ranks import ranks

from vitscale.ground.errors import PreemptedError
from vitscale.launch import Launch, Supervisor

DONE = "note('DONE', '{}')"


def launch(run_dir: Path, *attempts: tuple[str, ...], max_restarts: int = 3, **options):
    """(exit code, attempts) of a launch whose n-th attempt has these bodies; the last one repeats."""
    run_dir.mkdir(exist_ok=True)
    started = []

    def prepare(attempt: int):
        assert attempt == len(started)
        started.append(attempt)
        return ranks(run_dir, *attempts[min(attempt, len(attempts) - 1)])

    with Supervisor(grace_s=0.3) as supervisor:
        code = Launch(
            run_dir, prepare, supervisor, max_restarts=max_restarts, first_pause_s=options.pop("pause", 0.01), **options
        ).run()
    return code, len(started)


def journal(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "launch.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("body", "code", "attempts"),
    [
        (DONE, 0, 1),
        ("pass", 75, 2),
        ("sys.exit(1)", 1, 2),
        ("sys.exit(2)", 2, 1),
        ("sys.exit(3)", 3, 1),
        ("sys.exit(4)", 4, 1),
        ("sys.exit(75)", 75, 2),
        ("sys.exit(85)", 85, 1),
        ("os.abort()", 75, 2),
        ("os.kill(os.getpid(), signal.SIGKILL)", 75, 2),
        (f"{DONE}; os.abort()", 0, 1),
        (f"{DONE}; sys.exit(4)", 0, 1),
    ],
)
def test_what_an_end_leads_to(tmp_path, body, code, attempts):
    assert launch(tmp_path, (body,), max_restarts=1) == (code, attempts)


def test_the_survivors_of_a_failed_rank_do_not_hide_why(tmp_path):
    bodies = ("wait_for('gone'); sys.exit(75)", "note('gone'); time.sleep(0.1); sys.exit(3)")
    assert launch(tmp_path, bodies) == (3, 1)


def test_restarts_without_a_new_checkpoint_are_counted(tmp_path, capfd):
    assert launch(tmp_path, ("sys.exit(75)",), max_restarts=0) == (75, 1)
    assert launch(tmp_path, ("sys.exit(75)",), max_restarts=2) == (75, 3)
    assert "not restarted: the last 2 restarts brought no new checkpoint" in capfd.readouterr().err


def test_a_new_checkpoint_begins_the_count_again(tmp_path):
    fails, saves = "sys.exit(75)", "checkpoint({}); sys.exit(75)"
    attempts = [fails, saves.format(10), saves.format(20), fails]
    assert launch(tmp_path, *((body,) for body in attempts), max_restarts=1) == (75, 4)


def test_a_checkpoint_that_is_not_complete_is_no_progress(tmp_path):
    body = "(here / f'checkpoints/step-{time.time_ns()}').mkdir(parents=True); sys.exit(75)"
    assert launch(tmp_path, (body,), max_restarts=1) == (75, 2)


def test_without_checkpoints_to_see_steps_are_progress(tmp_path):
    steps = ["beat(5); sys.exit(1)", "beat(9); sys.exit(1)", "beat(9); sys.exit(1)"]
    assert launch(tmp_path, *((body,) for body in steps), max_restarts=1) == (1, 3)


def test_steps_are_no_progress_where_there_are_checkpoints(tmp_path):
    (tmp_path / "checkpoints/step-00000003").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000003/index.json").touch()
    steps = ["beat(5); sys.exit(1)", "beat(9); sys.exit(1)"]
    assert launch(tmp_path, *((body,) for body in steps), max_restarts=1) == (1, 2)


@pytest.mark.parametrize(
    ("bodies", "code", "attempts"),
    [
        (["sys.exit(1)"], 1, 2),
        (["os.abort()"], 75, 2),
        (["why('a'); sys.exit(1)", "why('b'); sys.exit(1)", "why('b'); sys.exit(1)"], 1, 3),
        (["sys.exit(1)", "sys.exit(75)", "sys.exit(1)"], 1, 4),
        (["beat(0); sys.exit(1)"], 1, 4),
        (["sys.exit(75)"], 75, 4),
        (["os.kill(os.getpid(), signal.SIGKILL)"], 75, 4),
    ],
)
def test_a_failure_before_the_first_heartbeat_that_repeats_itself_is_not_restarted(tmp_path, bodies, code, attempts):
    assert launch(tmp_path, *((body,) for body in bodies)) == (code, attempts)


def test_an_attempt_that_gets_through_ends_it(tmp_path):
    assert launch(tmp_path, ("sys.exit(1)",), ("os.abort()",), (DONE,)) == (0, 3)


def test_a_run_that_was_done_before(tmp_path):
    (tmp_path / "DONE").write_text("{}")
    assert launch(tmp_path, ("pass",)) == (0, 1)
    assert launch(tmp_path, ("sys.exit(2)",)) == (2, 1)


def test_a_run_that_is_to_stop_early_is_not_done(tmp_path):
    assert launch(tmp_path, ("pass",), stops_early=True) == (0, 1)
    assert launch(tmp_path, ("pass", "sys.exit(75)"), stops_early=True, max_restarts=0) == (75, 1)


def test_a_run_that_was_told_to_end_is_not_restarted(tmp_path):
    told = "signal.signal(signal.SIGTERM, lambda *_: sys.exit({})); note('ready'); time.sleep(100)"
    for number, (own, code) in enumerate([(85, 85), (75, 75), (3, 3), (0, 75)]):
        run_dir = tmp_path / str(number)
        threading.Thread(target=signal_when, args=([run_dir / "ready"], signal.SIGTERM), daemon=True).start()
        assert launch(run_dir, (told.format(own),)) == (code, 1)


def test_a_second_signal_is_75(tmp_path, monkeypatch):
    monkeypatch.setattr("vitscale.launch.supervisor._SAME_REQUEST_SECONDS", 0)
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); note('ready'); time.sleep(100)"
    arguments = ([tmp_path / "ready"], signal.SIGTERM, signal.SIGINT)
    threading.Thread(target=signal_when, args=arguments, daemon=True).start()
    assert launch(tmp_path, (body,)) == (75, 1)


def test_a_pause_ends_when_told_to(tmp_path):
    def restarts() -> bool:
        return (tmp_path / "launch.jsonl").exists() and journal(tmp_path)[-1]["event"] == "restart"

    def tell() -> None:
        while not restarts():
            time.sleep(0.01)
        signal_when([], signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    code, _ = launch(tmp_path, ("sys.exit(75)",), pause=60)
    assert code == 85
    assert [line["event"] for line in journal(tmp_path)] == ["started", "rank ended", "restart", "finished"]


def test_pauses_grow(tmp_path):
    launch(tmp_path, ("sys.exit(75)",), max_restarts=3)
    assert [line["pause_s"] for line in journal(tmp_path) if line["event"] == "restart"] == [0.01, 0.02, 0.04]


def test_the_journal_tells_the_story(tmp_path):
    launch(tmp_path, ("beat(3); sys.exit(75)", "beat(4); os.kill(os.getpid(), signal.SIGKILL)"), (DONE,))
    lines = journal(tmp_path)
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
