"""Contrastive learning through the trainer: the same on every world, stage and micro-batch, and after a stop."""

from pathlib import Path

import numpy as np
import pytest
import torch
from outcomes import assert_same_run, column
from PIL import Image
from ranks import job, launch, make_recipe
from typer.testing import CliRunner

from vitscale.about.checks.seen import History
from vitscale.cli.main import app
from vitscale.data.loader import training_loader, training_order
from vitscale.data.shards import Manifest

VIEWS = [
    {"name": "one", "count": 2, "operations": [{"kind": "color_jitter", "hue": 0.1}]},
    {"name": "other", "crop": {"kind": "inception"}, "operations": [{"kind": "random_erasing"}]},
]


def blocks(stage, micro=8, group=4, **others):
    return {
        **{"precision": "fp32", "data": {"views": VIEWS}, "batch": {"micro_max": micro}},
        "objective": {"kind": "contrastive", "group": group, "hidden": 16, "outputs": 8},
        **{"parallelism": {"zero_stage": stage}, "evaluation": {"validation": None}},
        "checkpoint": {"every": {"steps": 2}, "keep": 9},
        **others,
    }


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    jobs = [job(f"zero{stage}", blocks(stage)) for stage in (1, 3)]
    jobs.append(job("resumed", blocks(1), 3, None))
    jobs.append(job("small", blocks(2, 4)))
    whole = {"group": "global", "model": {"dropout": 0.1}, "check": {"audit_every": 1}}
    jobs.append(job("whole", blocks(1, **whole)))
    jobs.append(job("whole-resumed", blocks(1, **whole), 3, None))
    lejepa = {"objective": {"kind": "lejepa", "hidden": 16, "outputs": 8, "directions": 16, "center": ["one"]}}
    lejepa |= {"data": {"views": [VIEWS[0], {"name": "local", "size": 16}]}, "model": {"drop_path": 0.5}}
    jobs += [job(f"lejepa-{micro}", blocks(1, micro, **lejepa)) for micro in (2, 8)]
    jobs += [job(f"whole-{micro}", blocks(3 if micro == 2 else 1, micro, "global")) for micro in (2, 8)]
    launch(root, jobs, 2)
    alone = [("alone", blocks(0, 16)), ("whole-alone", blocks(0, 16, "global"))]
    alone.append(("lejepa-alone", blocks(1, 16, **lejepa)))
    alone.append(("collapsed", blocks(1, 16, "global", optimizer={"name": "adamw", "lr": 10.0})))
    launch(root, [job(*each) for each in alone], 1)
    return root


@pytest.mark.parametrize(("whole", "resumed"), [("zero1", "resumed"), ("whole", "whole-resumed")])
def test_a_stopped_run_equals_the_uninterrupted_one_to_the_last_bit(root, whole, resumed):
    assert_same_run(root, whole, resumed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("zero1", other) for other in ("zero3", "small", "alone")),
        *(("whole-8", other) for other in ("whole-2", "whole-alone")),
        *(("lejepa-8", other) for other in ("lejepa-2", "lejepa-alone")),
    ],
)
def test_every_world_stage_and_micro_batch_computes_the_same(root, one, other):
    """Groups are slots of the global batch: were they a rank's or a micro-batch's, every digit would differ."""
    figures = ["sigreg", "invariance"] if "lejepa" in one else ["repelled_cosine"]
    for key in ("loss", "grad_norm", "spread", "view_cosine", *figures):
        assert column(root, other, key) == pytest.approx(
            column(root, one, key), rel=1e-4 if key == "grad_norm" else 2e-5
        )
    assert column(root, other, "batch_digest") == column(root, one, "batch_digest")


def test_a_run_warns_of_collapse_once(root):
    assert column(root, "collapsed", "spread")[-1] < 0.05
    assert (root / "runs" / "collapsed.out").read_text().count("has collapsed") == 1
    assert "has collapsed" not in (root / "runs" / "whole-alone.out").read_text()


def first_batch(root):
    recipe, manifest = make_recipe(root, **blocks(1)), Manifest.load(root / "train")
    order = training_order(recipe, manifest)
    with training_loader(recipe, manifest, order, rank=0, world=1, start=0, stop=1, digest=True) as loader:
        return next(loader)


def test_the_very_pixels_of_all_views_are_found_again(root):
    batch = first_batch(root)
    history = History(root / "runs" / "zero1")
    [place] = history.find([int(batch.uids[3])])
    seen = [each for each in history.sightings([place])[0] if each.batch == 0]
    assert [each.view for each in seen] == [0, 1, 2] and {each.slot for each in seen} == {3}
    again = history.pixels(seen[0])
    for kind, views in zip(again.views, batch.views, strict=True):
        assert torch.equal(kind[0], views[3])
    assert len({each.box for each in seen}) == 3


def test_views_are_written_as_pictures(root, tmp_path):
    out, run = tmp_path / "out", root / "runs" / "zero1"
    done = CliRunner().invoke(app, ["seen", str(int(first_batch(root).uids[0])), "--run", str(run), "--out", str(out)])
    assert done.exit_code == 0, done.output
    pictures = sorted(out.iterdir())
    assert len(pictures) % 3 == 0 and {path.stem[-5:] for path in pictures} == {"view0", "view1", "view2"}
    assert np.asarray(Image.open(pictures[0])).shape == (32, 32, 3)
