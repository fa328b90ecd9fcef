"""A real Slurm of two nodes on this machine: its own munge, slurmctld and two slurmd, all in one folder."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo", "squeue", "srun")
# Both names are those of this machine everywhere, so that nothing outside the folder has to be changed.
NODES = (socket.gethostname().partition(".")[0], "localhost")

# A job that is requeued waits until its old credential has expired; a node that does not answer is down after 15 s.
_CONFIGURATION = """
ClusterName=vitscale-tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/affinity
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=2
ReturnToService=2
SlurmdTimeout=15
KillWait=60
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str:
    """Why there can be no such cluster here; nothing where there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)} (bash tests/cluster/setup.sh installs them)"
    return "" if os.geteuid() == 0 else "Slurm's daemons are started by root alone"


def wait_until(is_so: Callable[[], object], seconds: float, what: Callable[[], object] = lambda: "") -> None:
    """Fails, with what there is instead, when it never becomes so."""
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"waited {seconds:g} s in vain: {what()}"
        time.sleep(0.2)


class SlurmCluster:
    """The daemons, and what a user asks them; `environment` is what such a user needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("state", *NODES):
            (folder / name).mkdir()
        text = _CONFIGURATION.format(folder=folder, host=NODES[0], nodes=NODES, ports=_free_ports(3))
        (folder / "slurm.conf").write_text(text)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)

    def start(self) -> None:
        """All daemons; returns once both nodes are idle."""
        files = {"key-file": "munge.key", "socket": "munge.socket", "seed-file": "munge.seed", "log-file": "munged.log"}
        files["pid-file"] = "munged.pid"
        self._run("munged", "--force", *(f"--{name}={self.folder}/{file}" for name, file in files.items()))
        self._run("slurmctld")
        for node in NODES:
            self.start_node(node)
        wait_until(lambda: self.node_states() == {"idle"}, 60, self.logs)

    def start_node(self, node: str) -> None:
        self._run("slurmd", "-N", node)

    def stop(self) -> None:
        """End all jobs and daemons, and every process that is left of them."""
        with contextlib.suppress(AssertionError, subprocess.SubprocessError):
            self.cancel_all()
        _kill(self._processes())

    def cancel_all(self) -> None:
        self.ask("scancel", "--user=root")
        wait_until(lambda: not self.ask("squeue", "--noheader"), 30)

    def ask(self, *command: str) -> str:
        answer = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0, f"{command}: {answer.stderr}"
        return answer.stdout.strip()

    def node_states(self) -> set[str]:
        """Such as idle, mixed, allocated, down*."""
        with contextlib.suppress(AssertionError):  # slurmctld has just started
            return set(self.ask("sinfo", "--noheader", "--Node", "--format=%T").split())
        return set()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, ExitCode, Restarts ..."""
        words = self.ask("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, *states: str, seconds: float) -> dict[str, str]:
        wait_until(lambda: self.job(number)["JobState"] in states, seconds, lambda: (self.job(number), self.logs()))
        return self.job(number)

    def kill_node(self, node: str) -> None:
        """As if its power had failed: slurmd, what it started for the jobs, and all that these started."""
        _kill(process for process in self._processes() if self._node_of(process) == node)

    def logs(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))

    def _run(self, *command: str) -> None:
        subprocess.run(command, env=self.environment, check=True, timeout=60)

    def _processes(self) -> Iterator[psutil.Process]:
        """The daemons, which write to a log in the folder, and what has their configuration in its environment."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self._logs_of(process) or process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    yield process

    def _logs_of(self, process: psutil.Process) -> list[str]:
        files = [Path(file.path) for file in process.open_files()]
        return [file.stem for file in files if file.parent == self.folder and file.suffix == ".log"]

    def _node_of(self, process: psutil.Process) -> str | None:
        with contextlib.suppress(psutil.Error):
            return next(iter(self._logs_of(process)), process.environ().get("SLURMD_NODENAME"))
        return None


def _kill(processes: Iterable[psutil.Process]) -> None:
    killed = list(processes)
    for process in killed:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(killed, 10)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A cluster that has gone afterwards, with all that ran on it."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # short: paths of sockets have at most 107 characters
        cluster = SlurmCluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def vitscale(cluster: SlurmCluster, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`vitscale launch --cluster slurm`, as a user in a folder of the cluster."""
    environment = {**cluster.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vitscale", "launch", *arguments, "--cluster", "slurm"]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


def submit(cluster: SlurmCluster, folder: Path, *arguments: str) -> str:
    """The number of the job over both nodes that this has handed in."""
    outcome = vitscale(cluster, folder, "--nodes", "2", *arguments)
    assert outcome.returncode == 0, outcome.stderr
    [number] = re.findall(r"^launch: job (\d+),", outcome.stderr, re.MULTILINE)
    return number


def output(run_dir: Path, number: str) -> str:
    """What a job of a run has printed so far."""
    path = run_dir / f"slurm-{number}.out"
    return path.read_text() if path.exists() else ""
