"""Strangers, and nodes that have been taken over, at the port where the launches of several nodes meet."""

import contextlib
import json
import os
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from hostile.speaker import Speaker, come
from hostile.strange_files import ROOT
from launch.small_cluster import DONE, FOREVER, Cluster, ends
from processes import wait_until

from vitscale.ground.errors import PeerLostError, RecipeError
from vitscale.ground.machine import free_port
from vitscale.launch import FirstNode, Launch, OtherNode, Supervisor, ThisNode
from vitscale.launch.connections import read_secret, remove_secret, write_secret

SECRET = ".launch-secret"
_SLOW = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path):
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)


def secret_of(run_dir: Path) -> bytes:
    wait_until((run_dir / SECRET).exists)
    return (run_dir / SECRET).read_bytes()


class Meeting:
    """Node 0, or another node, in this process, which meets the others in a thread."""

    def __init__(self, run_dir: Path, node: int, wait_s: float = 60.0, devices: int = 1) -> None:
        self.port, self.run_dir, self.supervisor = int(free_port()), run_dir, Supervisor()
        self.layout, self.error = None, None
        place = ThisNode(node, 2, "127.0.0.1", self.port, wait_s)
        self.node = (
            FirstNode(place, None, self.supervisor, run_dir)
            if node == 0
            else OtherNode(place, self.supervisor, run_dir)
        )
        self.devices = devices
        self._thread = threading.Thread(target=self._meet, daemon=True)

    def _meet(self) -> None:
        try:
            self.layout = self.node.meet(self.devices, is_asked_for=True)
        except Exception as error:
            self.error = error

    def __enter__(self) -> "Meeting":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.told = signal.SIGTERM
        self.join()

    def join(self) -> None:
        self._thread.join(20)
        assert not self.still_waits()

    def still_waits(self) -> bool:
        return self._thread.is_alive()


# ---- Strangers at node 0 ---------------------------------------------------------------------------------------------


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def with_a_proof_of_another_connection(port: int, secret: bytes) -> Speaker:
    """A real node's first connection is overheard, and all that it sent is sent again."""
    real = come(port, secret, node=1)
    stranger = Speaker(connected(port), b"")
    stranger.say(real.number.hex().encode())
    stranger.say(real.sealed(HELLO, number=0))
    real.socket.close()
    return stranger


def unread(port: int) -> Speaker:
    """One that has not said its number."""
    stranger = Speaker.__new__(Speaker)
    stranger.socket = connected(port)
    stranger._lines = stranger.socket.makefile("rb")
    return stranger


def with_node_0s_own_lines(port: int, secret: bytes) -> Speaker:
    """Node 0's number is sent back to it, and then each of its lines."""
    stranger = unread(port)
    stranger.say(stranger.line())
    stranger.say(stranger.line())
    return stranger


def with_the_proof_of_another_node(port: int, secret: bytes) -> Speaker:
    stranger = Speaker(connected(port), secret)
    return saying(stranger, stranger.sealed(OF_ANOTHER).replace(b"[3, 4", b"[1, 2"))


def saying(speaker: Speaker, line: bytes) -> Speaker:
    speaker.say(line)
    return speaker


def sealing(port: int, secret: bytes, content: bytes, **wrongly: int) -> Speaker:
    """A node's message, whose number or direction is another one."""
    speaker = Speaker(connected(port), secret)
    return saying(speaker, speaker.sealed(content, **wrongly))


HELLO = b'{"hello": [1, 2, "host", "x"]}'
OF_ANOTHER = b'{"hello": [3, 4, "host", "x"]}'
STRANGERS: dict[str, Callable[[int, bytes], Speaker]] = {
    "no proof": lambda port, _: saying(Speaker(connected(port), b"?" * 32), b'{"node": 1}\n' + HELLO),
    "another secret": lambda port, secret: come(port, bytes([secret[0] ^ 1, *secret[1:]])),
    "an empty secret": lambda port, _: come(port, b""),
    "a proof of another connection": with_a_proof_of_another_connection,
    "node 0's own lines": with_node_0s_own_lines,
    "the other direction": lambda port, secret: sealing(port, secret, HELLO, is_first=True),
    "the proof of another node": with_the_proof_of_another_node,
    "a line out of turn": lambda port, secret: sealing(port, secret, HELLO, number=1),
    "no number": lambda port, _: saying(unread(port), b"00" * 31),
    "ten megabytes": lambda port, _: saying(Speaker(connected(port), b""), b"x" * 10_000_000),
}


def test_no_stranger_becomes_a_node_and_each_is_shown_out(tmp_path, capfd):
    with Meeting(tmp_path, 0) as first:
        secret = secret_of(tmp_path)
        for name, stranger in STRANGERS.items():
            assert stranger(first.port, secret).is_closed() and first.still_waits(), name
        come(first.port, secret).tell({"ready": [3, True]})
        first.join()
    assert first.layout.ranks == 1 and first.layout.world_size == 4
    assert capfd.readouterr().err.count("node 1 of 2 is there") <= 2  # the one that was overheard, and the last one


def test_a_line_that_was_read_is_not_read_again(tmp_path):
    with Meeting(tmp_path, 0) as first:
        speaker = come(first.port, secret_of(tmp_path))
        ready = speaker.sealed(b'{"trouble": "once"}')
        speaker.say(ready)
        speaker.say(ready)
        assert speaker.is_closed()


def test_nobody_who_only_connects_keeps_a_node_out(cluster):
    """Of the 300 files that node 0 may open, strangers could take all."""
    first = cluster.start(0, DONE, before=["prlimit", "--nofile=300:300"])
    secret_of(cluster.run_dir)  # it listens
    with ExitStack() as idle:
        for _ in range(350):
            idle.enter_context(connected(cluster.port))
        assert [code for code, _ in ends(first, cluster.start(1, DONE))] == [0, 0]


def test_a_host_with_many_connections_keeps_no_other_host_out(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with Meeting(tmp_path, 0) as first, ExitStack() as idle:
        secret = secret_of(tmp_path)
        for _ in range(1500):  # more than are shown out for their silence before a node has waited long enough
            idle.enter_context(socket.create_connection(("127.0.0.1", first.port), 10, ("127.0.0.2", 0)))
        come(first.port, secret).tell({"ready": [1, True]})
        first.join()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert first.layout.world_size == 2


def test_many_hosts_with_one_connection_each_keep_no_node_out(cluster):
    """They come again whenever they are shown out: their queue is longer than a node waits in it."""
    ended = threading.Event()

    def come_again(host: str) -> None:
        place = ("127.0.0.1", cluster.port)
        while not ended.is_set():
            with contextlib.suppress(OSError), socket.create_connection(place, 5, (host, 0)) as idle:
                while idle.recv(1 << 16) and not ended.is_set():
                    pass

    first = cluster.start(0, DONE)
    secret_of(cluster.run_dir)  # it listens
    crowd = [threading.Thread(target=come_again, args=(f"127.0.0.{n + 2}",)) for n in range(140)]
    for one in crowd:
        one.start()
    time.sleep(2)  # all are there
    codes = [code for code, _ in ends(first, cluster.start(1, DONE), within=60)]
    ended.set()
    for one in crowd:
        one.join()
    assert codes == [0, 0]


def test_single_bytes_do_not_keep_a_node_waiting(tmp_path):
    """Whoever has taken node 0's place sends a byte now and then, and never a line."""
    write_secret(tmp_path, os.urandom(32))
    supervisor, port = Supervisor(), int(free_port())
    other = OtherNode(ThisNode(1, 2, "127.0.0.1", port, 1.0), supervisor, tmp_path, silence_s=0.5)
    ended = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as stranger:
            while not ended.is_set():
                stranger.sendall(b"0")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(PeerLostError):
            other.meet(1, is_asked_for=True)
        ended.set()


def test_a_number_that_is_taken_stays_so_and_its_owner_may_come_back(tmp_path):
    with Meeting(tmp_path, 0) as first:
        secret = secret_of(tmp_path)
        owner = come(first.port, secret, launch="one")
        assert "already connected" in come(first.port, secret, launch="two").hear("refused")
        again = come(first.port, secret, launch="one")  # its first connection is half-dead: only it has noticed
        assert owner.is_closed()
        again.tell({"ready": [1, True]})
        first.join()
        assert again.hear("start") == [1, 1, 2, "127.0.0.1", first.layout.port]


# ---- Nodes that have been taken over ---------------------------------------------------------------------------------

END = {"rank": 1, "pid": 2, "returncode": 1, "step": None, "where": "w"}
DEEP = b'{"ready": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"

# Of either direction: what is no JSON, and what JSON may be instead of a message.
NO_MESSAGES = [
    *(b"", b"x", b"[]", b"5", b"null", b'"ready"', b"{", b"{}}", b"\xff\xfe", b"{\x00}", b'{"trouble": "\\ud800"}'),
    *(b'{"ready": NaN}', b'{"ready": 1' + b"0" * 5000 + b"}", DEEP, b"[" * 100_000, b'{"a": 1}', b'{"": {}}'),
    *({"trouble": 1}, {"trouble": ["a"]}, {"trouble": {}}, {"hello": []}, {"hello": "abcd"}, {"refused": 5}),
]
TO_FIRST = [
    *({"ready": one} for one in (5, [], [1], [1, True, 2], [0, True], [-1, True], [10**9, True], [True, True])),
    *({"ready": one} for one in ([1.0, True], ["1", True], [1, 1], [1, None], {"0": 1}, [[1], True], [1e400, True])),
    *({"leaves": one} for one in ("abcde", [], [2], [2, "x"], [2, "x", 1], [2, 5, False], ["2", "x", False])),
    *({"leaves": one} for one in ([2.5, "x", False], [True, "x", False], [2, "x", False, -1])),
    {"leaves": [2, "x", False, 0, -1.0]},
    *(b'{"leaves": [2, "x", false, 0, %s]}' % one for one in (b"NaN", b"Infinity", b"1e999", b"3601", b'"1"')),
    *({"account": one} for one in (5, [], "x", {"culprit": 5}, {"culprit": {}}, {"is_done": 1}, {"lost": None})),
    *({"account": {"culprit": {**END, key: one}}} for key, one in (("returncode", "x"), ("returncode", 10**6))),
    *({"account": {"culprit": {**END, key: one}}} for key, one in (("rank", -1), ("pid", 1.5), ("step", "7"))),
    *({"account": {"culprit": {**END, key: one}}} for key, one in (("where", 3), ("hung", None), ("more", 1))),
    *({"account": {"more": 1}}, {"start": [1, 1, 2, "h", 80]}, {"decision": [0, "done", False]}),
]
FROM_FIRST = [
    *({"start": one} for one in ([1], [0, 0, 1, "h", 80], [-1, 0, 1, "h", 80], [1, -1, 1, "h", 80])),
    {"start": [1, 0, 0, "h", 80]},
    *({"start": one} for one in ([1, 0, 10**12, "h", 80], [10**7, 0, 10**9, "h", 80], [1, 0, 1, "h", 0])),
    *({"start": one} for one in ([1, 0, 1, "h", 65536], [1, 0, 1, "", 80], [1, 0, 1, "a b", 80], [1, 0, 1, "a\0", 80])),
    *({"start": one} for one in ([1, 0, 1, "h" * 256, 80], [1, 0, 1, "a\n", 80], [True, 0, 1, "h", 80], "12345")),
    *({"decision": one} for one in ([1], ["1", "x", False], [1, "x", "no"], [1, "x", True, 0, 1e9], {"code": 1})),
    *({"ready": [1, True]}, {"leaves": [2, "x", False]}, {"account": {}}),
]


# One in three in every run; `make test-all` takes them all.
SOME = pytest.mark.parametrize("every", [3, pytest.param(1, marks=_SLOW)])


@SOME
def test_a_malformed_message_closes_its_connection_and_nothing_else(tmp_path, every):
    with Meeting(tmp_path, 0) as first:
        secret = secret_of(tmp_path)
        for message in [b'{"trouble": "' + b"x" * (2 << 20) + b'"}', *NO_MESSAGES[::every], *TO_FIRST[::every]]:
            speaker = come(first.port, secret)
            speaker.tell(message)
            assert speaker.is_closed() and first.still_waits(), (str(message)[:80], first.error)
        for hello in ([0, 2, "h", "x"], [-1, 2, "h", "x"], [70000, 70001, "h", "x"], [1, 2, "h\nlaunch: done", "x"]):
            speaker = Speaker(connected(first.port), secret)
            speaker.tell({"hello": hello})
            assert speaker.is_closed() and first.still_waits(), hello
        come(first.port, secret).tell({"ready": [1, True]})
        first.join()
    assert first.error is None and first.layout.world_size == 2


@SOME
def test_a_malformed_message_of_node_0_closes_the_connection_and_it_is_made_anew(tmp_path, every):
    write_secret(tmp_path, os.urandom(32))
    with Meeting(tmp_path, 1, devices=2) as other, socket.create_server(("127.0.0.1", other.port)) as listener:
        listener.settimeout(20)

        def met() -> Speaker:
            speaker = Speaker(listener.accept()[0], secret_of(tmp_path), is_first=True)
            speaker.tell({})
            assert speaker.hear("ready") == [2, True]
            return speaker

        for message in [b"[]", b'{"a": 1}', DEEP, *FROM_FIRST][::every]:
            speaker = met()
            speaker.tell(message)
            assert speaker.is_closed() and other.still_waits(), (str(message)[:80], other.error)
        met().tell({"start": [3, 0, 3, "127.0.0.1", 80]})  # more than it has
        other.join()
    assert isinstance(other.error, PeerLostError)


def test_whoever_plays_node_0_without_the_secret_starts_no_rank(tmp_path):
    write_secret(tmp_path, os.urandom(32))
    with Meeting(tmp_path, 1, wait_s=3.0) as other, socket.create_server(("127.0.0.1", other.port)) as listener:
        listener.settimeout(0.2)
        turn = 0
        while other.still_waits():
            with contextlib.suppress(TimeoutError):
                stranger = Speaker(listener.accept()[0], b"?" * 32, is_first=True)
                turn += 1
                if turn % 2:
                    stranger.tell({"start": [1, 0, 1, "127.0.0.1", 80]})
                else:  # its own number, and its own lines, come back
                    stranger.say(stranger.theirs)
                    stranger.say(stranger.line())
                assert stranger.is_closed()
    assert other.layout is None and isinstance(other.error, PeerLostError)
    assert turn >= 3  # it has tried again, as the real node 0 may come


LIES = [{"leaves": [0, "so long", False]}, {"leaves": [77, "so long", False]}, {"leaves": [-9, "so long", True]}]


@pytest.mark.parametrize("lie", LIES)
def test_a_node_cannot_end_the_run_with_0(cluster, lie):
    first = cluster.start(0, DONE)
    come(cluster.port, secret_of(cluster.run_dir)).tell(lie)
    [(code, shown)] = ends(first)
    assert code == 75 and "Traceback" not in shown and not (cluster.run_dir / "DONE").exists()


ACCOUNTS = [
    {"is_done": True},
    {"is_done": True, "all_ended_well": True},
    {"culprit": {**END, "returncode": 0}, "is_done": True},
    {"culprit": {**END, "returncode": 64}, "all_ended_well": True},
    {"culprit": {**END, "returncode": -64, "where": "\x1b[2J\nlaunch: exit code 0 after 9 s: done"}},
    {"lost": "\r\nlaunch: done", "told": "\x1b]0;x\x07"},
    {"unkillable": True, "is_done": True},
]


@pytest.mark.parametrize(
    "account", [one if number in (0, 3, 4) else pytest.param(one, marks=_SLOW) for number, one in enumerate(ACCOUNTS)]
)
def test_an_account_that_lies_does_not_finish_the_run(cluster, account):
    """Node 0's only rank ends with 0 and writes no DONE, so that all depends on the other's account."""
    first = cluster.start(0, "time.sleep(0.2)")
    speaker = come(cluster.port, secret_of(cluster.run_dir))
    for _ in range(3):
        speaker.tell({"ready": [1, True]})
        if speaker.hear("start") is None:
            break
        speaker.tell({"account": account})
        if not (speaker.hear("decision") or [0, "", False])[2]:
            break
    speaker.socket.close()
    first.send_signal(signal.SIGTERM)
    [(code, shown)] = ends(first)
    assert code in (1, 75, 85) and not (cluster.run_dir / "DONE").exists()
    assert "Traceback" not in shown and "\x1b" not in shown and "\nlaunch: exit code 0" not in shown


@pytest.mark.parametrize("more", [[3, 2.5], pytest.param([], marks=_SLOW)])
def test_node_0_cannot_tell_another_that_the_run_is_done(cluster, more):
    write_secret(cluster.run_dir, os.urandom(32))
    with socket.create_server(("127.0.0.1", cluster.port)) as listener:
        other = cluster.start(1, "pass")
        speaker = Speaker(listener.accept()[0], secret_of(cluster.run_dir), is_first=True)
        speaker.tell({})
        speaker.hear("ready")
        speaker.tell({"decision": [0, "done", False, *more]})
        [(code, shown)] = ends(other)
    assert code == 75 and "Traceback" not in shown


# ---- The secret ------------------------------------------------------------------------------------------------------


def test_the_secret_is_its_owners_alone_and_goes_with_the_launch(cluster):
    before = os.umask(0)
    try:
        launches = [cluster.start(node, "note(f'ready-{rank}'); wait_for('go'); " + DONE) for node in (0, 1)]
    finally:
        os.umask(before)
    wait_until(lambda: (cluster.run_dir / "ready-0").exists())
    assert stat.S_IMODE((cluster.run_dir / SECRET).stat().st_mode) == 0o600
    (cluster.run_dir / "go").touch()
    assert [code for code, _ in ends(*launches)] == [0, 0]
    assert not [path.name for path in cluster.run_dir.iterdir() if SECRET in path.name]


@pytest.mark.parametrize("before", ["stale", "link", "a folder of links"])
def test_what_an_earlier_launch_left_there_is_replaced(cluster, tmp_path_factory, before):
    victim = tmp_path_factory.mktemp("elsewhere") / "thesis.tex"
    victim.write_text("mine")
    if before == "stale":
        write_secret(cluster.run_dir, os.urandom(32))
    else:
        (cluster.run_dir / SECRET).symlink_to(victim if before == "link" else victim.parent / "nothing")
    second = cluster.start(1, DONE)  # which reads what lies there first
    time.sleep(0.3)
    assert [code for code, _ in ends(cluster.start(0, DONE), second)] == [0, 0]
    assert [path.name for path in victim.parent.iterdir()] == ["thesis.tex"] and victim.read_text() == "mine"


SPOILT: dict[str, Callable[[Path], object]] = {
    **{f"mode {mode:o}": partial(Path.chmod, mode=mode) for mode in (0o640, 0o604, 0o622)},
    "a link": lambda path: path.symlink_to(path.rename(path.with_name("other"))),
    "a folder": lambda path: (path.unlink(), path.mkdir(mode=0o600)),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
    "short": lambda path: os.truncate(path, 31),
    "long": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: os.truncate(path, 0),
    "gone": Path.unlink,
    "another's": lambda path: os.chown(path, 4001, -1),
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=ROOT if how == "another's" else ()) for how in SPOILT])
def test_a_secret_that_is_none_is_not_taken_for_one(tmp_path, how):
    secret = os.urandom(32)
    write_secret(tmp_path, secret)
    assert read_secret(tmp_path) == secret
    SPOILT[how](tmp_path / SECRET)
    with pytest.raises(OSError, match=SECRET):
        read_secret(tmp_path)
    remove_secret(tmp_path, secret)
    assert (tmp_path / SECRET).is_symlink() or (tmp_path / SECRET).exists() or how == "gone"


def test_another_launchs_secret_is_left_alone(tmp_path):
    write_secret(tmp_path, b"1" * 32)
    write_secret(tmp_path, b"2" * 32)
    remove_secret(tmp_path, b"1" * 32)
    assert read_secret(tmp_path) == b"2" * 32


def test_a_run_directory_that_cannot_hold_a_secret_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError):
        write_secret(tmp_path / "file" / "run", b"1" * 32)


def test_a_node_with_another_run_directory_is_told_what_to_look_at(cluster, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    first = cluster.start(0, FOREVER)
    secret_of(cluster.run_dir)
    write_secret(elsewhere, os.urandom(32))
    here, cluster.run_dir = cluster.run_dir, elsewhere
    [(code, shown)] = ends(cluster.start(1, FOREVER, wait=0.5))
    assert code == 75 and str(elsewhere) in shown and "--run-dir" in shown
    first.send_signal(signal.SIGTERM)
    assert ends(first)[0][0] == 85
    assert json.loads((here / "launch.jsonl").read_text().splitlines()[-1])["exit_code"] == 85


def test_a_launch_that_stops_early_believes_nobody_else(tmp_path):
    """With --stop-at, 0 needs no DONE: but it does need this node's own ranks."""
    with Meeting(tmp_path, 0) as first:
        come(first.port, secret_of(tmp_path)).tell({"leaves": [0, "x", False]})
        first.join()
    launch = Launch(tmp_path, lambda attempt: [], first.supervisor, first.node, stops_early=True)
    assert first.error.exit_code == 75 and launch.run() == 85
