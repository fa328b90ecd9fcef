"""Two ranks report what one reports, without what is damaged in a split, and fail together: one launch."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from damaged_dataset import write_damaged
from rank_processes import run_once
from toy_split import SIDE, model, split

from vitscale.data.augmentation import EvalTransform
from vitscale.data.loader import Loader
from vitscale.data.order import EvalOrder
from vitscale.data.settings import Reading
from vitscale.data.shards import Manifest
from vitscale.data.shards.generated import CLASS_NAMES
from vitscale.evaluation import FewShot, NearestNeighbours, SharedL2FewShot, Validation, evaluate
from vitscale.evaluation.features import extract_features
from vitscale.evaluation.fewshot import Again
from vitscale.evaluation.linear import AttentiveHeads, LinearHeads
from vitscale.ground.errors import DataError
from vitscale.objectives.classification import CrossEntropy
from vitscale.training.deepspeed.distributed import finish

K = 7
CLASSES = list("abcdefg")
# In evaluation no sample stands in for another: "substitute" leaves it out too.
POLICIES = {"damaged": ("mask", "substitute"), "without": ("error", "error")}
SHARDS = [30, 21, 11]
DAMAGED = {0: [0], 1: [7, 20]}  # slot 0 of shard 0 is the one that fillers repeat


def stored_loader(folder, policy, rank=0, world=1, rows=None):
    """A function that begins a pass over samples of seven classes, eight a rank at a time."""
    manifest = Manifest.load(folder)
    order = EvalOrder([entry.num_selected for entry in manifest.shards], 8 * world, rows)
    options = {"image_size": SIDE, "transform": EvalTransform(), "rank": rank, "world": world}
    reading = Reading(bad_samples=policy).for_evaluation()
    return lambda: Loader(manifest, order, reading=reading, **options)


def of_stored(folder, policies, rank=0, world=1):
    """Two evaluators, a policy each; the few-shot one draws from the split and is tested on it."""
    whole, drawn = (stored_loader(folder, policy, rank, world) for policy in policies)
    few = FewShot("stored-few", drawn, drawn, CLASS_NAMES, shots=(1, 5), l2=1.0)
    return [Validation("stored", whole, CrossEntropy("sigmoid", 0.9, 0.01).per_sample_loss), few]


def evaluators(rank, world, folder, stored="damaged"):
    # Odd sizes: the last batches have fillers, on one of the ranks nothing else.
    validation, train, test = split(41, K, seed=1), split(150, K, seed=2), split(66, K, seed=3)
    loaders = [part.loader(8, rank, world) for part in (train, test)]
    return [
        Validation("val", validation.loader(8, rank, world), CrossEntropy("sigmoid", 0.9, 0.01).per_sample_loss),
        FewShot("toy", *loaders, CLASSES, shots=(1, 5)),
        SharedL2FewShot("shared", [FewShot("toy", *loaders, CLASSES, shots=(5,))], l2s=(1.0, 2.0**10)),
        NearestNeighbours("knn", *loaders, CLASSES, (5, 20)),
        LinearHeads("linear", *loaders, CLASSES, steps=20),
        AttentiveHeads("attentive", *loaders, CLASSES, steps=20),
        *of_stored(Path(folder) / "split" / stored, POLICIES[stored], rank, world),
    ]


def failures(rank, world):
    """Messages of data errors that only one rank can see for itself, or that only rank 0 looks for."""
    mislabelled = split(41, K, seed=1)
    mislabelled.labels[0] = K
    data = split(41, K, seed=1).loader(8, rank, world)
    bad = [
        Validation("val", mislabelled.loader(8, rank, world), CrossEntropy("softmax").per_sample_loss),
        FewShot("toy", mislabelled.loader(8, rank, world), data, CLASSES, shots=(5,)),
        NearestNeighbours("knn", data, mislabelled.loader(8, rank, world), CLASSES, (5,)),
        NearestNeighbours("knn", data, data, CLASSES, (42,)),
        AttentiveHeads("attentive", data, data, CLASSES, images=82, room=82 * 16 * 4 - 1),
        LinearHeads("linear", data, mislabelled.loader(8, rank, world), CLASSES),
    ]
    messages = []
    for evaluator in bad:
        with pytest.raises(DataError) as error:
            evaluate([evaluator], model(K))
        messages.append(str(error.value))
    return messages


def evaluated_again(rank, world, folder):
    """What few-shot evaluators find: in a pass over the whole split, and twice in one over the samples that it drew."""
    loader = partial(stored_loader, folder, "error", rank, world)
    whole, few = (
        FewShot("few", loader(), loader(), CLASS_NAMES, shots=(1, 2), l2=1.0, again=again)
        for again in (None, Again(loader))
    )
    found = [evaluate([each], model(K)) for each in (whole, few, few)]
    assert 7 * 2 <= len(few.again.rows) <= 7 * 2 * 3
    return found


def worker(rank, world, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    report = [evaluate(evaluators(rank, world, folder), model(K)), failures(rank, world)]
    report += evaluated_again(rank, world, Path(folder) / "split" / "without")
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))
    finish(0)  # as every rank of vitscale ends: by the interpreter's end gloo's threads may abort it


def test_two_ranks_equal_one_that_sees_a_split_without_what_is_damaged(tmp_path):
    write_damaged(tmp_path / "split", SHARDS, DAMAGED)
    run_once(worker, (2, str(tmp_path)), 2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    alone = evaluate(evaluators(0, 1, tmp_path, "without"), model(K))
    # A loss is computed in fp32, and its last bit depends on where in a batch the sample stands.
    for loss in ("val/loss", "stored/loss"):
        assert first[0].pop(loss) == pytest.approx(alone.pop(loss), rel=1e-7)
    assert first[0] == alone
    assert first[1] == failures(0, 1)
    whole, *again = evaluated_again(0, 1, tmp_path / "split" / "without")
    assert first[2:] == [whole, *again] and again == [whole, whole]


def test_features_are_those_of_the_split_without_what_is_damaged(tmp_path):
    write_damaged(tmp_path, SHARDS, DAMAGED)
    found = {
        name: extract_features(stored_loader(tmp_path / name, policy), model(K))
        for name, policy in (("sound", "error"), ("damaged", "mask"), ("without", "error"))
    }
    gone = [0, 30 + 7, 30 + 20]
    assert found["without"].uids.tolist() == [uid for uid in range(sum(SHARDS)) if uid not in gone]
    for name in ("features", "labels", "uids"):
        expected = getattr(found["without"], name)
        assert torch.equal(getattr(found["damaged"], name), expected)
        assert torch.equal(getattr(found["sound"], name)[found["without"].uids], expected)
    with pytest.raises(DataError, match=r"shard-0000[01]\.beton"):  # unless the recipe says otherwise
        evaluate(of_stored(tmp_path / "damaged", ("error", "error")), model(K))
