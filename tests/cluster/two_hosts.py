"""Two hosts on this machine: each has its own network, name and ssh server, and they have this file system in common.

Everything is in namespaces and one folder, and is undone at the end. A third namespace, the front, is where commands
are typed: it reaches both by ssh without a password, by the names vnode1 and vnode2, and so do they each other.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

HOSTS = ("vnode1", "vnode2")
_NETWORK = "10.77.0"
_BRIDGE = "vsbr"
_PROGRAMS = ("ip", "unshare", "/usr/sbin/sshd", "ssh", "ssh-keygen", "pdsh")
_SSHD = """
Port 22
ListenAddress {address}
HostKey {folder}/host
AuthorizedKeysFile {folder}/id.pub
PidFile {folder}/{host}.pid
StrictModes no
UsePAM no
PermitRootLogin yes
"""
_SSH = """
Host vnode*
  IdentityFile {folder}/id
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def why_not() -> str:
    """Why there can be no such hosts here; nothing where there can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)} (bash tests/cluster/setup.sh installs them)"
    if os.geteuid() != 0:
        return "network namespaces are made by root alone"
    probe = subprocess.run(["unshare", "-nmu", "true"], capture_output=True, text=True)
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


class TwoHosts:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, command: list[str], at: str = "front") -> list[str]:
        """The same at the front or on a host."""
        name = ["unshare", "-u", "sh", "-c", 'hostname "$0" && exec "$@"', at]
        return ["ip", "netns", "exec", _namespace(at), *name, *command]

    def cut(self, host: str) -> None:
        _ip("link", "set", f"{_namespace(host)}h", "down")

    def mend(self, host: str) -> None:
        _ip("link", "set", f"{_namespace(host)}h", "up")

    def processes(self, at: str, words: str = "") -> list[psutil.Process]:
        """What runs there and has these words in its command line; its ssh server apart."""
        found = []
        for pid in _ip("netns", "pids", _namespace(at)).split():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(int(pid))
                line = " ".join(process.cmdline())
                if words in line and "sshd" not in line and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """They are there inside, and nothing is left of them outside."""
    folder = Path(tempfile.mkdtemp(prefix="vitscale-hosts-"))
    had_sshd = Path("/run/sshd").exists()
    try:
        _remove()  # what is left where tests were killed
        hosts = TwoHosts(folder)
        _build(hosts)
        yield hosts
    finally:
        _remove()
        if not had_sshd:
            shutil.rmtree("/run/sshd", ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _remove() -> None:
    for name in ("front", *HOSTS):
        with contextlib.suppress(subprocess.CalledProcessError):
            for pid in _ip("netns", "pids", _namespace(name)).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "delete", _namespace(name))
        shutil.rmtree(Path("/etc/netns") / _namespace(name), ignore_errors=True)
    with contextlib.suppress(OSError):
        Path("/etc/netns").rmdir()
    with contextlib.suppress(subprocess.CalledProcessError):
        _ip("link", "delete", _BRIDGE)


def _build(hosts: TwoHosts) -> None:
    folder = hosts.folder
    for key in ("id", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    _ip("link", "add", _BRIDGE, "type", "bridge")
    _ip("link", "set", _BRIDGE, "up")
    names = "127.0.0.1 localhost\n" + "".join(f"{_address(name)} {name}\n" for name in ("front", *HOSTS))
    for name in ("front", *HOSTS):
        space = _namespace(name)
        # `ip netns exec` puts these in the place of /etc/hosts and /etc/ssh/ssh_config.
        (Path("/etc/netns") / space / "ssh").mkdir(parents=True)
        (Path("/etc/netns") / space / "hosts").write_text(names)
        (Path("/etc/netns") / space / "ssh" / "ssh_config").write_text(_SSH.format(folder=folder))
        _ip("netns", "add", space)
        _ip("link", "add", f"{space}h", "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", f"{space}h", "master", _BRIDGE, "up")
        _ip("-n", space, "address", "add", f"{_address(name)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")
    for host in HOSTS:
        configuration = folder / f"{host}.conf"
        configuration.write_text(_SSHD.format(address=_address(host), folder=folder, host=host))
        subprocess.run(hosts.command(["/usr/sbin/sshd", "-f", str(configuration)], at=host), check=True)
    until = time.monotonic() + 20
    for host in HOSTS:
        while subprocess.run(hosts.command(["ssh", host, "true"]), capture_output=True).returncode:
            assert time.monotonic() < until, f"no ssh to {host}"
            time.sleep(0.2)


def _namespace(name: str) -> str:
    return {"front": "vs0", "vnode1": "vs1", "vnode2": "vs2"}[name]


def _address(name: str) -> str:
    return f"{_NETWORK}.{_namespace(name)[-1] if name != 'front' else 9}"


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
