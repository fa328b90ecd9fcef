"""Requests to end: Ctrl-C, SIGTERM and SIGUSR1 from a scheduler, or a time limit.

The first request asks for a checkpoint between this step and the next; a later one ends the process at once. Handlers
written in Python run only between two instructions of the main thread, which may be inside a collective for minutes.
Hence a thread reads the signals from a pipe that the interpreter's own handler writes to.

One Ctrl-C may arrive twice: from the terminal as SIGINT, and from torchrun as SIGINT or DeepSpeed's launcher as
SIGTERM. That launcher sends its SIGTERM to one rank after another, to each when the previous one has ended: under it
only another Ctrl-C is a second request.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from typing import NoReturn

from vitscale.ground.errors import PeerLostError, PreemptedError

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A scheduler and a launcher may both pass on the same request.
_SAME_REQUEST_SECONDS = 2.0
_OF_DEEPSPEEDS_LAUNCHER = "CROSS_RANK"  # a variable that only this launcher sets


class Interruption(contextlib.AbstractContextManager["Interruption"]):
    """Listens for requests to end, from its construction until `close`. Use from the main thread. A context manager.

    Before `save_first` is called the process has nothing to lose, and a request ends it at once.

    Args:
        time_limit_s: seconds from now after which this process should end; None for no limit.
        answers: whether to print at once that a request has arrived.
    """

    def __init__(self, time_limit_s: float | None = None, *, answers: bool = False) -> None:
        self._answers = answers
        self._deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._first: float | None = None
        self._what = ""
        self._saves_first = False
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        self._before = {
            number: signal.signal(number, lambda *_: None)
            for number in _SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup and `command &` in scripts ignore it on purpose
        }
        self._writing, self._woke_before = writing, signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reading,), name="vitscale-signals", daemon=True).start()

    def close(self) -> None:
        """Restore the previous signal handlers."""
        signal.set_wakeup_fd(self._woke_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._writing)  # ends the listening thread

    def __exit__(self, *_: object) -> None:
        self.close()

    def save_first(self) -> None:
        """From now on the first request only sets `pending`, for the caller to save and end."""
        self._saves_first = True
        if self._first is not None:
            self._end_before_the_first_step()  # the request arrived during this call

    @property
    def pending(self) -> bool:
        """Whether this process was asked to end, or its time is up."""
        return self._first is not None or (self._deadline is not None and time.monotonic() >= self._deadline)

    @property
    def reason(self) -> str:
        """What asked this process to end; a signal to another rank if it was not asked itself."""
        if self._first is not None:
            return self._what
        return "the time limit" if self.pending else "a signal to another rank"

    def _listen(self, reading: int) -> None:
        with open(reading, "rb", buffering=0) as signals:
            while numbers := signals.read(64):
                for number in numbers:
                    if number in _SIGNALS:
                        self._request(signal.Signals(number))

    def _request(self, number: signal.Signals) -> None:
        now, is_deepspeeds = time.monotonic(), _OF_DEEPSPEEDS_LAUNCHER in os.environ
        if self._first is None:
            self._what, self._first = _name(number), now
            if not self._saves_first:
                self._end_before_the_first_step()
            if self._answers:
                again = "Ctrl-C again" if number == signal.SIGINT or is_deepspeeds else "Another signal"
                _say(f"{self._what}: saving after this step. {again} ends at once, without saving")
        # DeepSpeed's launcher passes on the same request a second time, as SIGTERM.
        elif now - self._first > _SAME_REQUEST_SECONDS and not (is_deepspeeds and number == signal.SIGTERM):
            _end(f"{_name(number)} again: ending without a checkpoint of this step", PeerLostError.exit_code)

    def _end_before_the_first_step(self) -> NoReturn:
        _end(f"{self._what} before the first step: ending", PreemptedError.exit_code)


def _name(number: signal.Signals) -> str:
    return "Ctrl-C" if number == signal.SIGINT else number.name


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that was closed
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()


def _end(message: str, code: int) -> NoReturn:
    _say(f"rank {os.environ.get('RANK', '0')}: {message}")
    os._exit(code)
