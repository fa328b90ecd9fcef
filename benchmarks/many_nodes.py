"""The launches of many nodes meet, lose one and end: how long, and what node 0 needs for it.

    $ python benchmarks/many_nodes.py --nodes 1000

Node 0 is the real one, in a process of its own. The others are coroutines of this process, which speak the protocol
over real sockets by themselves: some are slow and send a few bytes at a time, some come twice and have to be refused,
one falls silent. Goals: all have met after 10 s, the silent one is named within 40 s, node 0 needs less than 200 MB and
one core.
"""

import argparse
import asyncio
import hashlib
import hmac
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vitscale.ground.machine import free_port
from vitscale.launch.nodes import Account, Decision, ThisNode
from vitscale.launch.several_nodes import FirstNode
from vitscale.launch.supervisor import Supervisor

GOALS = {"meeting_s": 10.0, "naming_s": 40.0, "memory_mb": 200.0, "cores": 1.0}
LOOK_EVERY_SECONDS = 0.05  # as a launch does
SIGNS_OF_LIFE = 10  # in the time after which a silent node is lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--slow", type=int, default=20)
    parser.add_argument("--doubled", type=int, default=10)
    parser.add_argument("--silence", type=float, default=30.0, help="seconds after which a silent node is lost")
    parser.add_argument("--open-files", type=int, help="that node 0 may have unless it asks for more")
    parser.add_argument("--port", help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.port is not None:
        be_node_0(given)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # of the coroutines
    with tempfile.TemporaryDirectory() as folder:
        given.port, given.run_dir = free_port(), Path(folder)
        measure(given, soft, hard)


def measure(given: argparse.Namespace, soft: int, hard: int) -> None:
    """Start node 0, come as all others, and print what was found."""
    command = [sys.executable, __file__, *sys.argv[1:], "--port", given.port, "--run-dir", str(given.run_dir)]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (given.open_files or soft, hard))

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=limit) as node_0:
        crowd = asyncio.run(come(given))
        assert node_0.stdout is not None
        told = [json.loads(line) for line in node_0.stdout]
    if node_0.returncode != 0:
        raise SystemExit(node_0.returncode)
    found = {**crowd, **{key: value for line in told for key, value in line.items()}}
    if given.json:
        print(json.dumps(found))
        return
    print(
        f"{given.nodes} nodes: met after {found['meeting_s']:.1f} s, the silent one named after "
        f"{found['naming_s']:.1f} s; node 0: {found['memory_mb']:.0f} MB, {found['cores']:.2f} cores; "
        f"{crowd['refused']} of {given.doubled} refused, {crowd['decided']} told of the end"
    )
    missed = [f"{key} at most {goal:g}" for key, goal in GOALS.items() if found[key] > goal]
    print(f"missed: {', '.join(missed)}" if missed else "met")


def be_node_0(given: argparse.Namespace) -> None:
    """Meet, watch until a node is lost, and end with all others."""
    began = time.monotonic()
    first = FirstNode(
        ThisNode(0, given.nodes, "127.0.0.1", int(given.port)),
        None,
        Supervisor(),
        given.run_dir,
        silence_s=given.silence,
    )
    layout = first.meet(8, is_asked_for=False)
    assert layout is not None
    met = time.monotonic()
    print(json.dumps({"meeting_s": met - began, "world_size": layout.world_size}), flush=True)
    trouble = ""
    while not trouble:
        time.sleep(LOOK_EVERY_SECONDS)
        trouble = first.exchange("")
    print(json.dumps({"naming_s": time.monotonic() - met, "trouble": trouble}), flush=True)
    accounts = []

    def decide(of_all):
        accounts.extend(of_all)
        return Decision(75, trouble, restarts=False)

    first.conclude(Account(), decide)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cores = (used.ru_utime + used.ru_stime) / (time.monotonic() - began)
    lost = sum(bool(account.lost) for account in accounts)
    print(json.dumps({"memory_mb": used.ru_maxrss / 1000, "cores": cores, "accounts": len(accounts), "lost": lost}))


async def come(given: argparse.Namespace) -> dict[str, int]:
    """All nodes but 0 come, the last of them to fall silent, and those that come twice."""
    silent = given.nodes - 1
    all_met = asyncio.Event()
    others = [
        node_of_crowd(given, node, all_met, is_slow=node <= given.slow, is_silent=node == silent)
        for node in range(1, given.nodes)
    ]
    # A number that is taken: those come when all have met.
    doubled = [node_of_crowd(given, 1 + index, all_met, is_second=True) for index in range(given.doubled)]
    ends = await asyncio.gather(*others, *doubled)
    return {"decided": ends.count("decision"), "refused": ends.count("refused")}


async def node_of_crowd(
    given: argparse.Namespace,
    node: int,
    all_met: asyncio.Event,
    *,
    is_slow: bool = False,
    is_silent: bool = False,
    is_second: bool = False,
) -> str:
    """What ended it: decision, refused, or closed."""
    if is_second:
        await all_met.wait()
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(given.port))
            break
        except OSError:
            await asyncio.sleep(0.5)

    own, sent = os.urandom(32), 0

    async def write(line: bytes) -> None:
        line += b"\n"
        at_once = 5 if is_slow else len(line)
        for first in range(0, len(line), at_once):
            writer.write(line[first : first + at_once])
            await writer.drain()
            if is_slow:
                await asyncio.sleep(0.05)

    async def send(message: dict[str, object]) -> None:
        nonlocal sent
        content = json.dumps(message).encode()
        sent += 1
        await write(
            hmac.new(key, b"0 %d " % (sent - 1) + content, hashlib.sha256).hexdigest().encode() + b" " + content
        )

    try:
        await write(own.hex().encode())
        numbers = sorted([own, bytes.fromhex((await reader.readline()).decode())])
        secret = (given.run_dir / ".launch-secret").read_bytes()
        key = hmac.new(secret, b"vitscale launch" + b"".join(numbers), hashlib.sha256).digest()
        await send({"hello": [node, given.nodes, f"host-{node}", f"launch-{node}-{is_second}"]})
        await send({"ready": [8, False]})
        waited: asyncio.Task[bytes] | None = None
        while True:
            waited = waited or asyncio.create_task(reader.readline())
            done, _ = await asyncio.wait([waited], timeout=given.silence / SIGNS_OF_LIFE)
            if not done:
                if not (is_silent and all_met.is_set()):
                    await send({})
                continue
            line, waited = waited.result(), None
            if not line:
                return "closed"
            message = json.loads(line.partition(b" ")[2])
            if "start" in message:
                all_met.set()
            elif "trouble" in message:
                await send(
                    {
                        "account": {
                            **{"culprit": None, "is_done": False, "all_ended_well": False},
                            **{"told": "", "unkillable": False, "lost": ""},
                        }
                    }
                )
            for end in ("decision", "refused"):
                if end in message:
                    return end
    except (OSError, ValueError):
        return "closed"
    finally:
        writer.close()


if __name__ == "__main__":
    main()
