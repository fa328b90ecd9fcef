"""What the ends of ranks mean together."""

import itertools
import random
import signal

import pytest

from vitscale.ground import errors
from vitscale.launch.ends import End, cause


def end(rank: int, returncode: int, **more) -> End:
    return End(rank, 1000 + rank, returncode, 5, "after step 5 (training)", **more)


HUNG = {"was_killed": True, "hung": "gave no sign of life for 61 s (its process: stopped, T)"}
# In the order in which they explain the others: what goes wrong by itself, then silence, then what follows from a peer.
CLASSES = [
    [end(0, 1), end(1, 2), end(2, 3), end(3, 4), end(4, -signal.SIGKILL), end(5, 130)],
    [end(6, -signal.SIGKILL, **HUNG)],
    [end(7, 75)],
    [end(8, -signal.SIGKILL, was_killed=True)],
]


@pytest.mark.parametrize("seed", range(20))
def test_the_cause_is_the_earliest_end_that_is_no_consequence(seed):
    chosen = random.Random(seed)
    all_ends = [*itertools.chain(*CLASSES), end(9, 0), end(10, 85)]
    ends = chosen.sample(all_ends, k=chosen.randint(1, len(all_ends)))
    bad = [[one for one in ends if one in group] for group in CLASSES]
    assert cause(ends) == next((group[0] for group in bad if group), None)


def test_good_ends_have_no_cause():
    assert cause([]) is None
    assert cause([end(0, 0), end(1, 85), end(2, -signal.SIGTERM, was_told=True)]) is None


@pytest.mark.parametrize(
    ("returncode", "code"), [(1, 1), (2, 2), (3, 3), (4, 4), (75, 75), (-9, 75), (-64, 75), (130, 1), (120, 1)]
)
def test_the_code_of_a_launch_that_ends_for_it(returncode, code):
    assert end(0, returncode).code == code


def test_every_code_of_an_error_has_a_meaning():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 5
    for kind in kinds:
        assert "unknown" not in end(0, kind.exit_code).describe()


def test_ends_in_words():
    assert end(3, -signal.SIGSEGV).describe() == "rank 3 (pid 1003) was killed by SIGSEGV after step 5 (training)"
    assert "signal 40" in end(0, -40).describe()
    assert "exit code 130 (unknown)" in end(0, 130).describe()
    assert "stopped, T" in end(0, -9, **HUNG).describe()
