"""What ranks send each other runs no code: no pickle, whatever a rank that was taken over sends."""

import json

import pytest
from hostile.rank_work import be_attacked, exchange, train_and_prove
from training.ranks import make_data, start


def test_a_training_that_is_continued_and_a_proof_exchange_no_pickle(tmp_path):
    make_data(tmp_path)
    start(train_and_prove, tmp_path, None, 2)
    assert [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in (0, 1)] == [[[], True], [[], None]]
    assert (tmp_path / "run" / "DONE").exists()


def test_values_arrive_to_the_last_bit_and_errors_with_their_class(tmp_path):
    start(exchange, tmp_path, None, 2)
    first, other = (json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in (0, 1))
    assert first[0] == other[0] and first[0][::2] == ["MachineError", True]
    assert first[1][0] == "OwnError" and other[1] == ["MachineError", first[1][1], True]
    # A bug keeps its exception, and so its trace, where it is; the others end as those that have lost a rank.
    assert first[2] == ["ZeroDivisionError", "a bug", None] and other[2][0] == "PeerLostError"
    assert first[3][0] == "TypeError" and other[3][0] == "PeerLostError"
    assert first[4] == other[4] == ["VitscaleError", "", True]


@pytest.mark.parametrize("attack", ["gather", "broadcast", "-1", "0", str(1 << 45)])
def test_a_rank_that_was_taken_over_runs_no_code_elsewhere(tmp_path, attack):
    start(be_attacked, tmp_path, attack, 2)
    assert (tmp_path / "outcome").read_text() == "PeerLostError" and not (tmp_path / "ran").exists()
