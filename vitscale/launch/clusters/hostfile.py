"""Runs on the hosts of a file, by ssh: one `vitscale launch` on each, which the front watches and which dies with it.

The front is the process that a person started. What it runs on a host depends on the ssh connection: remote_shell.py
kills it when that breaks. The launches meet and restart by themselves; where a host is lost, all of them end.
"""

import contextlib
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

import vitscale
from vitscale.ground.errors import EXIT_DONE, RecipeError
from vitscale.ground.files.durable import make_folder
from vitscale.ground.storage import read_text
from vitscale.ground.wording import counted
from vitscale.launch.clusters import Job, launch_command, read_options, refuse_node_options, shell_line, shell_words
from vitscale.launch.ends import EXIT_RETRY, FINAL
from vitscale.launch.environment import split_address
from vitscale.launch.pretraining import launch_pretraining
from vitscale.launch.rank import die_with
from vitscale.launch.remote_shell import SILENCE_SECONDS
from vitscale.launch.supervisor import PASSED_ON, SignalWatch, say
from vitscale.runs.reading import parse_object

_LOST = 255  # ssh's exit code if it lost the connection, or never had one
_ANSWER_SECONDS = 10
_LATE_SECONDS = 5.0  # a network file system may show late what another machine has written
_NODE_WAIT_MINUTES = 1.0  # for the launches to meet: one that is lost does not come back
_BEAT_SECONDS = 3.0
_LOOK_EVERY_SECONDS = 0.05
_ROOT = str(Path(vitscale.__file__).parents[1])
_FORWARDED = re.compile(r"(VITSCALE|NCCL|GLOO|TORCH|OMP|PYTHON|UCX|FI)_?[A-Z0-9_]*|LD_LIBRARY_PATH")

# What a host is asked before anything starts: one line of JSON.
_PROBE = """
import json, os, sys, time
sys.path.insert(0, {root!r})
try:
    os.chdir({folder!r})
    import vitscale
    until, found = time.monotonic() + {late}, False
    while not found and time.monotonic() < until:
        found = os.path.exists({token!r})
        found or time.sleep(0.2)
    answer = {{"version": vitscale.__version__, "file": vitscale.__file__, "shares": found}}
except Exception as error:
    answer = {{"error": repr(error)}}
print(json.dumps(answer))
"""


class HostfileOptions(BaseModel):
    """`hostfile`: the file. `ssh`: the program with its options, such as "ssh -p 2222 -i KEY"."""

    model_config = ConfigDict(extra="forbid")
    hostfile: Path
    ssh: str = "ssh"


class Host(NamedTuple):
    """A machine and its number of ranks."""

    name: str
    slots: int


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file in DeepSpeed's format. Raises `RecipeError` with the line for anything else in it."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        raise RecipeError(f"--hostfile {path}: {why}; expected a file of lines such as `node1 slots=8`") from None
    hosts: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(lines, start=1):
        where, content = f"{path}, line {number}", line.partition("#")[0].strip()
        if not content:
            continue
        match = re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)\s+slots=(\d{1,4})", content)
        if match is None:
            raise RecipeError(f"{where}: {content!r} is not of the form `node1 slots=8`")
        name, slots = match[1], int(match[2])
        if slots == 0:
            raise RecipeError(f"{where}: {name} has no slots; leave the line out, or count the CUDA devices of {name}")
        if name in hosts:
            raise RecipeError(f"{where}: {name} is already in line {hosts[name][1]}")
        hosts[name] = (slots, number)
    if not hosts:
        raise RecipeError(f"{path}: no hosts; expected lines such as `node1 slots=8`")
    for name, (_, number) in hosts.items():
        if len(hosts) > 1 and (name == "localhost" or name.startswith("127.")):
            raise RecipeError(
                f"{path}, line {number}: {name} means a different machine on every host; write the name by "
                "which the others know it"
            )
    return [Host(name, slots) for name, (slots, _) in hosts.items()]


def render(job: Job) -> str:
    """What runs on each host, and the ssh that starts it."""
    front = _Front(job)
    lines = []
    for node, host in enumerate(front.hosts):
        lines += [
            f"# node {node} of {len(front.hosts)}: {shell_line(front.ssh(host))}",
            f"cd {shlex.quote(str(Path.cwd()))} && {shell_line(front.command(node), _environment())}",
        ]
    return "\n".join(lines)


def submit(job: Job) -> int:
    """Run the job on all hosts, and wait until it has ended. Raises `RecipeError` if a host cannot take part."""
    front = _Front(job)
    if [host.name for host in front.hosts] == ["localhost"]:
        return launch_pretraining(replace(job.what, ranks=front.hosts[0].slots), max_restarts=job.max_restarts)
    return front.run()


class _Front:
    """The process that a person started, which watches one launch on each host."""

    def __init__(self, job: Job) -> None:
        refuse_node_options(job, "hostfile")
        if "hostfile" not in job.options:
            raise RecipeError("--cluster hostfile needs --hostfile FILE, with lines such as `node1 slots=8`")
        options = read_options(job, HostfileOptions)
        self._job = replace(job, wait_for_nodes_minutes=_NODE_WAIT_MINUTES)
        self._ssh = shell_words("ssh", options.ssh)
        self.hosts = read_hostfile(options.hostfile)
        if job.nodes is not None and job.nodes > len(self.hosts):
            raise RecipeError(f"--nodes {job.nodes}: {options.hostfile} has {counted(len(self.hosts), 'host')}")
        self.hosts = self.hosts[: job.nodes]
        if job.what.ranks is not None:
            short = [host.name for host in self.hosts if host.slots < job.what.ranks]
            if short:
                raise RecipeError(f"--ranks {job.what.ranks}: {', '.join(short)} has fewer slots in {options.hostfile}")
            self.hosts = [Host(host.name, job.what.ranks) for host in self.hosts]
        ranks, batch = sum(host.slots for host in self.hosts), job.what.load().batch.global_size
        if not job.what.smoke and batch % ranks:
            raise RecipeError(
                f"{ranks} ranks do not divide batch.global {batch:,}: choose another --ranks a host, or --nodes"
            )
        self._run_dir = job.what.directory

    # ---- What runs where ---------------------------------------------------------------------------------------------

    def ssh(self, host: Host, command: str | None = None) -> list[str]:
        """The ssh command to a host; by default the one that keeps a launch there."""
        alive = ["-o", "ServerAliveInterval=5", "-o", f"ServerAliveCountMax={SILENCE_SECONDS / 5:.0f}"]
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_ANSWER_SECONDS}", *alive]
        program = f"import sys; sys.path.insert(0, {_ROOT!r}); from vitscale.launch.remote_shell import main; main()"
        return [*self._ssh, "-T", *options, host.name, command or _python(program)]

    def command(self, node: int) -> list[str]:
        """`vitscale launch` for one of the hosts."""
        program, ranks = [sys.executable, "-P", "-m", "vitscale"], self.hosts[node].slots
        nodes, master = len(self.hosts), ""
        if nodes > 1:
            address, port = split_address(self._job.master or self.hosts[0].name)
            master = f"{address}:{port}"
        return launch_command(self._job, program, nodes=nodes, node_rank=str(node), master=master, ranks=ranks)

    # ---- The run -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until the job has ended on all hosts. Returns the exit code."""
        launches: list[_HostLaunch] = []
        with SignalWatch() as signals:
            self._check_all()
            names = ", ".join(f"{host.name} ({host.slots})" for host in self.hosts)
            say(f"starts on {names}, run directory {self._run_dir}")
            try:
                for node, host in enumerate(self.hosts):
                    start = {"folder": str(Path.cwd()), "environment": _environment(), "command": self.command(node)}
                    launches.append(_HostLaunch(host, self.ssh(host), start))
                codes = _watch(launches, signals)
            finally:
                for launch in launches:
                    launch.kill()
        known = [code for code in codes if code != _LOST]  # on which these agree
        code = next((code for code in (EXIT_DONE, *FINAL) if code in known), [*known, EXIT_RETRY][0])
        lost = [host.name for host, end in zip(self.hosts, codes, strict=True) if end == _LOST]
        if lost and code == EXIT_RETRY and signals.told is None:
            say(f"repeat the command when {' and '.join(lost)} can be reached again, or with another --hostfile")
        return code

    # ---- The hosts ---------------------------------------------------------------------------------------------------

    def _check_all(self) -> None:
        """Raise `RecipeError` unless every host answers, has this version, and sees the run directory."""
        token = self._run_dir.absolute() / f".hosts.{secrets.token_hex(4)}.part"
        try:
            make_folder(self._run_dir)
            token.touch()
        except OSError as error:
            raise RecipeError(f"{self._run_dir} cannot be written: {error.strerror}") from None
        probe = _python(_PROBE.format(root=_ROOT, folder=str(Path.cwd()), late=_LATE_SECONDS, token=str(token)))
        try:
            probes = {
                host: subprocess.Popen(
                    self.ssh(host, probe),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
                for host in self.hosts
            }
            answers = {host: _answer(process) for host, process in probes.items()}
        finally:
            token.unlink()
        problems = []
        for host, answer in answers.items():
            if "version" not in answer:
                problems.append(f"  {host.name}: {answer['error']}")
            elif answer["version"] != vitscale.__version__:
                problems.append(f"  {host.name}: has vitscale {answer['version']} and this is {vitscale.__version__}")
            elif not answer.get("shares"):
                problems.append(f"  {host.name}: does not see files written here to {self._run_dir.absolute()}")
        if problems:
            raise RecipeError(
                "not all hosts can take part:\n" + "\n".join(problems) + "\nEvery host needs an ssh login without a "
                "password, vitscale at the same path, and the run directory on a file system that all of them share"
            )


def _watch(launches: "Sequence[_HostLaunch]", signals: SignalWatch) -> list[int]:
    """Pass signals on until all launches have ended. Returns their exit codes."""
    beat_at, is_told = time.monotonic(), False
    lost: set[_HostLaunch] = set()
    while None in (codes := [launch.code() for launch in launches]):
        for launch, code in zip(launches, codes, strict=True):
            if code == _LOST and launch not in lost:
                lost.add(launch)
                say(f"the connection to {launch.host.name} is lost; the launches of the other hosts end their ranks")
        if signals.at_once:
            say("a second signal: ending all ranks at once")
            return [EXIT_RETRY] * len(codes)
        if signals.told is not None and not is_told:
            is_told = True
            for launch in launches:
                launch.send({"signal": PASSED_ON[signals.told].name})
        if time.monotonic() - beat_at > _BEAT_SECONDS:
            beat_at = time.monotonic()
            for launch in launches:
                launch.send({})
        time.sleep(_LOOK_EVERY_SECONDS)
    return [code for code in codes if code is not None]


class _HostLaunch:
    """The near end of the ssh connection to a host's launch. It dies with this process, and so does what it runs."""

    def __init__(self, host: Host, ssh: Sequence[str], start: Mapping[str, Any]) -> None:
        self.host = host
        self._process = subprocess.Popen(
            ssh, stdin=subprocess.PIPE, bufsize=0, start_new_session=True, preexec_fn=die_with(os.getpid())
        )
        assert self._process.stdin is not None
        self._input = self._process.stdin
        self.send(start)
        os.set_blocking(self._input.fileno(), False)  # a connection that hangs must not stop us

    def send(self, line: Mapping[str, Any]) -> None:
        """Send a line to the far end, if there still is one."""
        with contextlib.suppress(OSError):
            self._input.write(json.dumps(line).encode() + b"\n")

    def code(self) -> int | None:
        """The launch's exit code, `_LOST` if the connection ended without one; None while it runs."""
        code = self._process.poll()
        return _LOST if code is not None and code < 0 else code

    def kill(self) -> None:
        """End the connection, if it is still there; the far end does the rest."""
        self._process.kill()
        self._process.wait()
        self._input.close()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """A host's answer to the probe: version, file and shares, or error."""
    try:
        shown, complaint = process.communicate(timeout=3 * _ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"has not answered for {3 * _ANSWER_SECONDS} s"}
    said = complaint.strip().splitlines()
    error = f"does not answer ({said[-1] if said else f'exit code {process.returncode}'})"
    return {"error": error, **(parse_object(shown.strip().rpartition("\n")[2].encode()) or {})}


def _python(program: str) -> str:
    """A Python program as a command for a remote shell."""
    return shlex.join([sys.executable, "-c", program])


def _environment() -> dict[str, str]:
    """The variables of ours that every host gets; none that is secret or differs between hosts."""
    chosen = {name: value for name, value in sorted(os.environ.items()) if _FORWARDED.fullmatch(name)}
    return {**chosen, "PYTHONPATH": os.pathsep.join(filter(None, [_ROOT, chosen.get("PYTHONPATH")]))}
