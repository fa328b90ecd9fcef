"""Going on without some images: from which step, at what cost, and that the branch has never seen them.

Compared with logs of the samples of every update, which the tests keep beside real trainings.
"""

import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from outcomes import checkpoint as checkpoint_of
from outcomes import column, equal, metrics, seen_again, stored_bytes, uids_of
from rank_faults import log_samples, poison
from ranks import job, launch, make_recipe
from stock_beton import write_stock
from typer.testing import CliRunner

from data_tools.views import write_without
from vitscale.about.checks.seen import History
from vitscale.about.checks.verifying import Asked, verify_run
from vitscale.cli.main import app
from vitscale.data.shards import Manifest, SelectFirst
from vitscale.data.shards.adopt import adopt
from vitscale.data.shards.info import why_no_view
from vitscale.ground.errors import CheckpointError, DataError, RecipeError
from vitscale.recipe import read_recipe
from vitscale.runs.checkpoint_index import read_index
from vitscale.training.beginning.run_plan import plan_run
from vitscale.training.loop.resuming import check_branch

TOTAL = 12  # steps: 105 images make 6 batches of 16 an epoch
SKIPPED = 2  # the batch with a bad loss
FIRST = {"run": 6, "adopted": 3}  # the step that is the first one to see what goes
SAVED = 4  # the newest checkpoint before it


def blocks(**others):
    """In epochs, with mixing partners and a batch that is left out."""
    return {
        "schedule": {"duration": {"epochs": 2}, "warmup": {"epochs": 0.5}},
        "checkpoint": {"every": {"steps": 2}, "keep": 20},
        "evaluation": {"validation": None},
        "objective": {"mixing": {"mixup": 0.8}},
        "anomalies": {"non_finite": "skip"},
        **others,
    }


def logging(root, name, content, *stops, faults=()):
    log = partial(log_samples, file=str(root / "runs" / f"{name}.log"))
    return job(name, content, *stops, faults=[*faults, log])


def logged(root, name):
    """(step, uid) -> how often, over all ranks."""
    files = (root / "runs").glob(f"{name}.log-*")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return Counter((step, uid) for step, uids in rows for uid in uids)


def told(root, name):
    """The same, as the run's files tell it."""
    history = History(root / "runs" / name)
    uids = uids_of(history.manifest)
    found = zip(uids, history.sightings(history.find(uids)), strict=True)
    return Counter((seen.step, uid) for uid, sightings in found for seen in sightings if seen.step is not None)


def without(*arguments, run, stdin=None):
    """What the command says with --json; errors for people are raised."""
    result = CliRunner().invoke(app, ["without", *map(str, arguments), "--run", str(run), "--json"], input=stdin)
    if isinstance(result.exception, Exception):
        raise result.exception
    return json.loads(result.stdout)


def first_seen(root, name):
    """uid -> the step that was the first one to see it."""
    found = {}
    for step, uid in sorted(logged(root, name)):
        found.setdefault(uid, step)
    return found


def adopt_stock_file(root):
    """The dataset `adopted`: a file of FFCV's own writer with 60 images."""
    from ffcv.fields import IntField, RGBImageField

    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, 256, (40, 40, 3), np.uint8), number % 5) for number in range(60)]
    file = write_stock(root / "all.beton", {"image": RGBImageField(write_mode="jpg"), "label": IntField()}, rows)
    adopt(str(file), str(root / "adopted"))


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    """A run on one rank that has left a batch out, one on its way, and one of adopted data; branches on two ranks."""
    adopt_stock_file(root)
    bad = partial(poison, positions={SKIPPED: "gradient"}, rank=0, row=1)
    of_adopted = blocks(data={"train": "adopted"}, schedule={"duration": {"steps": 8}, "warmup": {"steps": 1}})
    jobs = [
        logging(root, "run", blocks(), faults=[bad]),
        logging(root, "on-its-way", blocks(), 4, faults=[bad]),
        logging(root, "adopted", of_adopted),
    ]
    launch(root, jobs, world_size=1)
    for name in ("run", "adopted"):
        firsts = first_seen(root, name)
        gone = [min(uid for uid, step in firsts.items() if step == FIRST[name])]
        gone += [uid for uid, step in firsts.items() if step > FIRST[name]]
        (root / f"{name}.txt").write_text("# to be taken down\n" + "\n".join(map(str, gone)) + "\n\n")
        found = without(root / f"{name}.txt", "--out", root / f"{name}-view", run=root / "runs" / name)
        (root / f"{name}.json").write_text(json.dumps(found))
    branch, of_adopted = (read_recipe(root / f"{name}-view" / "branch.yaml").dump() for name in ("run", "adopted"))
    jobs = [
        logging(root, "branch", branch),
        logging(root, "resumed", branch, 5, 9, None),
        logging(root, "of-adopted", of_adopted),
    ]
    launch(root, jobs, world_size=2)
    return root


@pytest.fixture(scope="module")
def gone(root):
    return [int(line) for line in (root / "run.txt").read_text().splitlines()[1:] if line]


@pytest.fixture(scope="module")
def found(root):
    return json.loads((root / "run.json").read_text())


def test_it_names_the_first_step_the_checkpoint_and_the_cost(root, found, gone):
    log, rows = logged(root, "run"), metrics(root, "run")
    assert found["uids"] == sorted(gone) and found["is_finished"]
    assert found["first_step"] == FIRST["run"] and log[FIRST["run"], found["first_uid"]] > 0
    assert found["updates"] == sum(count for (_, uid), count in log.items() if uid in gone)
    assert found["start"] == {
        "step": SAVED,
        "init": {"from": str(root / "runs" / "run"), "step": SAVED, "continue": True},
    }
    assert found["again"]["steps"] == TOTAL - SAVED
    by_metrics = rows[-1]["exaflops"] - next(row["exaflops"] for row in rows if row["step"] == SAVED)
    assert found["again"]["exaflops"] == pytest.approx(by_metrics)
    pace = sum(row["step_time_s"] for row in rows) / TOTAL
    assert found["again"]["hours"] == pytest.approx((TOTAL - SAVED) * pace / 3600)
    assert str(root / "run-view" / "branch.yaml") in found["command"]


def test_the_view_has_all_but_them_and_is_no_copy(root, found, gone):
    whole, view = Manifest.load(root / "train"), Manifest.load(root / "run-view")
    assert sorted(uids_of(view)) == sorted(set(uids_of(whole)) - set(gone))
    assert found["view"]["samples"] == view.num_samples == whole.num_samples - len(gone)
    assert not list((root / "run-view").glob("*.beton"))
    assert [int(line) for line in (root / "run-view" / "left_out_uids.txt").read_text().split()] == sorted(gone)
    assert why_no_view(view, whole) is None and why_no_view(whole, view) is not None


def test_the_branch_may_begin_in_any_folder(root, gone, tmp_path, monkeypatch):
    monkeypatch.chdir(root.parent)
    without(gone[0], "--data-root", root.name, "--out", f"{root.name}/any-view", run=Path(root.name, "runs", "run"))
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(root / "any-view" / "branch.yaml")
    assert recipe.dataset_path("test") == str(root / "test")
    check_branch(plan_run(recipe, 0, 1), tmp_path / "none")


@pytest.mark.parametrize("name", ["branch", "resumed"])
def test_the_branch_has_never_seen_them(root, gone, name):
    log = logged(root, name)
    assert {step for step, _ in log} == set(range(SAVED + 1, TOTAL + 1)) and sum(log.values()) == 16 * (TOTAL - SAVED)
    assert not {uid for _, uid in log} & set(gone)
    before = Counter({(step, uid): count for (step, uid), count in logged(root, "run").items() if step <= SAVED})
    assert told(root, name) == log + before
    history = History(root / "runs" / name)
    assert not any(seen.step for sightings in history.sightings(history.find(gone)) for seen in sightings)
    assert history.left_out == 1


def test_its_first_epoch_is_a_whole_one_and_none_of_the_trunks(root):
    """Each image at most once in each epoch of the view, and no crop twice."""
    history = History(root / "runs" / "branch")
    view = Manifest.load(root / "run-view")
    per_epoch = view.num_samples // 16
    log = logged(root, "branch")
    first_epoch = [uid for (step, uid) in log.elements() if step <= SAVED + per_epoch]
    assert len(set(first_epoch)) == len(first_epoch) == 16 * per_epoch
    uids = uids_of(history.manifest)
    epochs = [[seen.epoch for seen in each] for each in history.sightings(history.find(uids))]
    assert all(len(set(each)) == len(each) for each in epochs)
    assert (np.diff(column(root, "branch", "epoch")) > 0).all()


def test_rendered_again_digests_are_those_of_the_branch_and_its_trunk(root):
    history = History(root / "runs" / "branch")
    digests, _ = seen_again(history, uids_of(history.manifest))
    rows = {row["step"]: row for name in ("run", "branch") for row in metrics(root, name)}
    assert len(rows) == TOTAL
    assert {step: digests[step] for step in rows} == {step: row["batch_digest"] for step, row in rows.items()}


def test_it_keeps_the_schedule_and_is_the_same_after_every_stop(root):
    assert column(root, "branch", "lr") == column(root, "run", "lr")[SAVED:]
    for key in ("loss", "grad_norm", "batch_digest"):
        assert column(root, "branch", key) == column(root, "resumed", key)
    assert equal(checkpoint_of(root, "branch", TOTAL), checkpoint_of(root, "resumed", TOTAL))


def test_its_checkpoints_say_where_its_data_changed(root):
    index = read_index(root / "runs" / "branch" / "checkpoints" / f"step-{TOTAL:08d}")
    trunk = read_index(root / "runs" / "run" / "checkpoints" / f"step-{SAVED:08d}")
    before = index.data["init"]["data_before"]
    assert before["manifest_sha256"] == trunk.data["manifest_sha256"] == Manifest.load(root / "train").sha256
    assert index.data["manifest_sha256"] == Manifest.load(root / "run-view").sha256
    assert (before["stop"], before["start"]) == (SAVED + 1, 5)  # 95 of 105 images are left or fewer: 5 batches an epoch


@pytest.mark.slow
def test_the_branch_verifies(root, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    findings = list(verify_run(root / "runs" / "branch", Asked(steps=4, ranks=2)))
    assert [finding for finding in findings if finding.is_sound is False] == []
    assert any("last bit" in finding.detail for finding in findings)


# ---- Again, and where there is nothing to do -------------------------------------------------------------------------


def test_a_branch_is_branched_again(root, gone, tmp_path):
    """Before the branch it is its trunk's checkpoints that one goes back to, and at the very beginning none."""
    by_run = first_seen(root, "run")
    later = {uid: step for uid, step in sorted(first_seen(root, "branch").items()) if by_run.get(uid, TOTAL) > SAVED}
    uid, step = next((uid, step) for uid, step in later.items() if step > SAVED + 2)
    here = without(uid, gone[0], run=root / "runs" / "branch")
    assert here["first_step"] == step and here["left_out_already"] == [gone[0]] and here["uids"] == [uid]
    assert here["start"]["step"] == (step - 1) // 2 * 2
    assert here["start"]["init"]["from"] == str(root / "runs" / "branch")
    early = next(uid for uid, step in by_run.items() if step == 3)
    before = without(early, "--out", tmp_path / "view", run=root / "runs" / "branch")
    assert before["start"] == {"step": 2, "init": {"from": str(root / "runs" / "run"), "step": 2, "continue": True}}
    assert before["view"]["samples"] == Manifest.load(root / "run-view").num_samples - 1
    recipe = read_recipe(tmp_path / "view" / "branch.yaml")
    check_branch(plan_run(recipe, 0, 1), tmp_path / "none")
    first = next(uid for uid, step in by_run.items() if step == 1)
    beginning = without(first, "--out", tmp_path / "again", run=root / "runs" / "branch")
    assert beginning["start"] == {"step": 0, "init": None}
    assert read_recipe(tmp_path / "again" / "branch.yaml").init is None


def test_runs_that_continue_each_other(root, tmp_path):
    first = next(uid for uid, step in first_seen(root, "run").items() if step == 1)
    for one, other in (("a", "b"), ("b", "a")):
        shutil.copytree(root / "runs" / "branch", tmp_path / one)
        recipe = read_recipe(tmp_path / one / "recipe.yaml").dump()
        recipe["init"]["from"] = str(tmp_path / other)
        (tmp_path / one / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(CheckpointError, match="itself"):
        without(first, run=tmp_path / "a")


def test_a_run_on_its_way_goes_on_from_where_it_is(root):
    by_run, seen = first_seen(root, "run"), first_seen(root, "on-its-way")
    assert all(by_run[uid] == step for uid, step in seen.items())
    uid = next(uid for uid in by_run if uid not in seen)
    found = without("-", run=root / "runs" / "on-its-way", stdin=f"{uid}\n")
    assert found["first_step"] is None and not found["is_finished"]
    assert found["start"]["step"] == 4 and found["again"]["steps"] == 0


def test_what_was_never_seen_needs_no_branch(root, tmp_path):
    unseen = sorted(set(uids_of(Manifest.load(root / "train"))) - {uid for _, uid in logged(root, "run")})
    assert unseen, "an image of the left-out batch that the second epoch leaves out"
    found = without(unseen[0], "--out", tmp_path / "view", run=root / "runs" / "run")
    assert found["first_step"] is found["start"] is found["command"] is None
    assert found["view"]["samples"] == 104 and not (tmp_path / "view" / "branch.yaml").exists()
    result = CliRunner().invoke(app, ["without", str(unseen[0]), "--run", str(root / "runs" / "run")])
    assert result.exit_code == 0 and "no branch is needed" in result.stdout


def test_images_are_taken_by_their_bytes(root, tmp_path):
    history = History(root / "runs" / "run")
    uid = uids_of(history.manifest)[40]
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "one.jpg").write_bytes(stored_bytes(history, uid))
    assert without(tmp_path / "images", run=root / "runs" / "run")["uids"] == [uid]


def test_mistakes_are_told(root, tmp_path):
    run = root / "runs" / "run"
    for error, match, words, stdin in (
        (DataError, r"\b2\b.* 4711, 100000000000000000000000", [0, 4711, 10**23], None),
        (DataError, None, ["-"], "\n# nothing\n"),
        (DataError, "line 2", ["-"], "1\nno number\n"),
        (DataError, "line 1", ["-"], "9" * 5000),
        (DataError, None, ["9" * 5000], None),
        (DataError, None, [tmp_path / "missing.txt"], None),
        (RecipeError, None, [0, "--out", root / "train"], None),
    ):
        with pytest.raises(error, match=match):
            without(*words, run=run, stdin=stdin)
    with pytest.raises(RecipeError):
        without(0, run=tmp_path)
    (tmp_path / "recipe.yaml").write_text((run / "recipe.yaml").read_text())
    with pytest.raises(CheckpointError):
        without(0, run=tmp_path)
    (tmp_path / "all.txt").write_text("\n".join(map(str, uids_of(Manifest.load(root / "train")))))
    with pytest.raises(RecipeError):
        without(tmp_path / "all.txt", "--out", tmp_path / "view", run=run)
    assert not (tmp_path / "view").exists() or not list((tmp_path / "view").iterdir())


def test_data_that_are_no_view_are_refused(root, tmp_path):
    """More than the trunk had, or other shards."""
    whole, recipe = Manifest.load(root / "train"), read_recipe(root / "run-view" / "branch.yaml").dump()
    trunk = {"from": str(root / "runs" / "branch"), "step": 6, "continue": True}
    entries = [entry.model_copy(update={"path": f"../train/{entry.path}"}) for entry in whole.shards]
    entries[0] = entries[0].model_copy(update={"select": SelectFirst(first=entries[0].samples - 1)})
    fields = {name: getattr(whole, name) for name in Manifest.model_fields}
    fewer = fields | {"num_samples": whole.num_samples - 1, "shards": tuple(entries)}
    (root / "fewer").mkdir()
    Manifest(**fewer).save(root / "fewer")
    for data in ("train", "fewer", "test"):
        other = make_recipe(root, **recipe | {"init": trunk, "data": {**recipe["data"], "train": data}})
        with pytest.raises((CheckpointError, RecipeError)):
            check_branch(plan_run(other, 0, 1), tmp_path / "none")
    of_run = {"from": str(root / "runs" / "run"), "step": 6, "continue": True}
    passes = make_recipe(root, **recipe | {"init": of_run, "data": {**recipe["data"], "train": "fewer"}})
    check_branch(plan_run(passes, 0, 1), tmp_path / "none")


def test_of_adopted_files_as_well(root):
    found = json.loads((root / "adopted.json").read_text())
    assert (found["first_step"], found["start"]["step"]) == (FIRST["adopted"], 2)
    assert told(root, "adopted") == logged(root, "adopted")
    log = logged(root, "of-adopted")
    assert {step for step, _ in log} == set(range(3, 9)) and not {uid for _, uid in log} & set(found["uids"])
    before = Counter({key: count for key, count in logged(root, "adopted").items() if key[0] <= 2})
    assert told(root, "of-adopted") == log + before


def test_a_view_of_a_dataset_without_its_last_shard_drops_that_shard(root, tmp_path):
    whole = Manifest.load(root / "train")
    last = whole.shards[-1]
    uids = np.arange(last.first_uid, last.first_uid + last.samples)
    view = write_without(whole, uids, str(tmp_path / "view"), {})
    assert len(view.shards) == len(whole.shards) - 1 and why_no_view(view, whole) is None
