"""What an interruption listens to, and that it leaves signals as they were: runs show the rest (tests/faults)."""

import os
import signal
import threading

from processes import wait_until

from vitscale.ground.interruption import Interruption

LISTENED_TO = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def listeners():
    return [thread for thread in threading.enumerate() if thread.name == "vitscale-signals"]


def test_a_signal_is_heard_and_afterwards_all_is_as_before():
    before = {number: signal.getsignal(number) for number in LISTENED_TO}
    woken = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(woken)
    with Interruption() as interruption:
        interruption.save_first()
        assert not interruption.pending
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: interruption.pending)
        assert "SIGUSR1" in interruption.reason
    wait_until(lambda: listeners() == [])
    assert {number: signal.getsignal(number) for number in LISTENED_TO} == before
    assert signal.set_wakeup_fd(woken) == woken


def test_time_is_up_without_a_signal():
    with Interruption(time_limit_s=0.05) as interruption:
        wait_until(lambda: interruption.pending)
        assert "time limit" in interruption.reason
