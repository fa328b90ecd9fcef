"""Being told to end: SIGTERM and SIGUSR1 from a scheduler, or a time limit.

The first request asks for a checkpoint at the next border of two steps, a later one ends the process at once. Handlers
written in Python run only between two instructions of the main thread, which may be inside a collective for minutes.
Hence a thread reads the signals from a pipe that the interpreter's own handler writes to.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from typing import NoReturn

from vitscale.errors import PeerLostError, PreemptedError

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A scheduler and a launcher may both pass on one request.
_SAME_REQUEST_SECONDS = 2.0


class Interruption:
    """Listens from its construction, in the main thread, to the end of the process.

    Until `save_first` the process has nothing to lose, and a request ends it at once.

    Args:
        time_limit_s: seconds after which this process is to end, from now; None for no limit.
    """

    def __init__(self, time_limit_s: float | None = None) -> None:
        self._deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._first: float | None = None
        self._what = ""
        self._saves_first = False
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reading,), name="vitscale-signals", daemon=True).start()

    def save_first(self) -> None:
        """From now on a request waits for whoever looks at `pending`."""
        self._saves_first = True
        if self._first is not None:
            self._end_before_the_first_step()  # it came while this was being called

    @property
    def pending(self) -> bool:
        """Whether this process was asked to end, or its time is up."""
        return self._first is not None or (self._deadline is not None and time.monotonic() >= self._deadline)

    @property
    def reason(self) -> str:
        """What asked this process to end; another rank, where it was not asked itself."""
        if self._first is not None:
            return self._what
        return "the time limit" if self.pending else "a signal to another rank"

    def _listen(self, reading: int) -> None:
        while True:
            for number in os.read(reading, 64):
                if number in _SIGNALS:
                    self._request(signal.Signals(number).name)

    def _request(self, name: str) -> None:
        now = time.monotonic()
        if self._first is None:
            self._what, self._first = name, now
            if not self._saves_first:
                self._end_before_the_first_step()
        elif now - self._first > _SAME_REQUEST_SECONDS:
            _end(f"{name} again: ending without a checkpoint", PeerLostError.exit_code)

    def _end_before_the_first_step(self) -> NoReturn:
        _end(f"{self._what} before the first step: ending", PreemptedError.exit_code)


def _end(message: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # a terminal that was closed
        sys.stderr.write(f"rank {os.environ.get('RANK', '0')}: {message}\n")
        sys.stderr.flush()
    os._exit(code)
