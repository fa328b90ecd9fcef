"""Recipes whose data lie at a URL: what is worked out before a run, from a real S3 server."""

import pytest
from s3_server import SECRET
from typer.testing import CliRunner

from vitscale.cli.main import app
from vitscale.data.shards.generated import CLASS_NAMES, write_generated_dataset
from vitscale.evaluation import Validation
from vitscale.ground.errors import DataError, RecipeError
from vitscale.recipe import Recipe, load_recipe
from vitscale.training.beginning.run_plan import plan_run

RECIPE = """
model: {name: ViT-Ti/16}
data: {train: pictures/train, image_size: 32}
batch: {global: 8}
optimizer: {name: adamw, lr: 1.0e-3}
schedule: {duration: {epochs: 2}}
evaluation:
  validation: pictures/test
  fewshot: {tasks: [{name: pictures, train: pictures/train, test: pictures/test}], shots: [1]}
"""


@pytest.fixture(scope="module")
def data(s3, tmp_path_factory):
    local = tmp_path_factory.mktemp("local")
    write_generated_dataset(local / "train", [20, 13], seed=0)
    write_generated_dataset(local / "test", [9], seed=1)
    s3.put(local, "ds/pictures")
    return s3


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "pictures.yaml").write_text(RECIPE)

    def load(*settings: str) -> Recipe:
        return load_recipe(tmp_path / "pictures.yaml", settings)

    return load


def test_a_run_is_planned_from_manifests_at_a_url_however_it_is_named(data, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_url = ["data.train=s3://bucket/ds/pictures/train", "evaluation.fewshot=null"]
    by_url.append("evaluation.validation=s3://bucket/ds/pictures/test")
    plans = [plan_run(recipe("data.root=s3://bucket/ds"), 0, 1), plan_run(recipe(*by_url), 0, 1)]
    (tmp_path / "datasets.yaml").write_text("pictures: s3://bucket/ds/pictures\n")
    plans.append(plan_run(recipe(), 0, 1))
    (tmp_path / "datasets.yaml").unlink()
    monkeypatch.setenv("VITSCALE_DATA_ROOT", "s3://bucket/ds/")
    plans.append(plan_run(recipe(), 0, 1))
    for plan in plans:
        assert plan.manifest.where == "s3://bucket/ds/pictures/train/manifest.json"
        assert plan.manifest.class_names == CLASS_NAMES and plan.total_steps == 2 * (33 // 8)
        assert isinstance(plan.evaluators[0], Validation)
    assert [len(plan.evaluators) for plan in plans] == [2, 1, 2, 2]


def test_what_is_wrong_with_data_at_a_url_is_said_with_the_url(data, recipe, tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"s3://bucket/none/pictures/train"):
        plan_run(recipe("data.root=s3://bucket/none"), 0, 1)
    with pytest.raises(RecipeError, match=r"s3://bucket/ds/pictures/train/manifest\.json.*\b7\b"):
        plan_run(recipe("data.root=s3://bucket/ds", "model.num_classes=3"), 0, 1)
    other = tmp_path / "other"
    manifest = write_generated_dataset(other, [8])
    manifest.model_copy(update={"class_names": ("x", *CLASS_NAMES[1:])}).save(other)
    url = data.put(other, "ds/other")
    with pytest.raises(DataError, match=rf"{url}.*\b0\b.*'x'"):
        plan_run(recipe("data.root=s3://bucket/ds", f"evaluation.validation={url}"), 0, 1)
    s3fs = pytest.importorskip("s3fs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-" + SECRET)
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(DataError, match="s3://bucket/ds"):
            plan_run(recipe("data.root=s3://bucket/ds"), 0, 1)
    s3fs.S3FileSystem.clear_instance_cache()


def test_looking_at_a_recipe_asks_no_network(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody is there
    done = CliRunner().invoke(app, ["recipe", str(tmp_path / "pictures.yaml"), "--set", "data.root=s3://nowhere/ds"])
    assert done.exit_code == 0, done.output
    assert recipe("data.root=s3://nowhere/ds").dataset_path("pictures/train") == "s3://nowhere/ds/pictures/train"
