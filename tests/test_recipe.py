"""The recipe: what is read from a file, and where its datasets are found."""

import re
import typing
from pathlib import Path

import pytest
import typer
import yaml
from pydantic import BaseModel
from test_recipe_mistakes import MINIMAL, refused

from vitscale.cli.recipe import show_difference
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.extensions import ENTRY_POINTS
from vitscale.recipe import (
    Duration,
    Recipe,
    differences,
    explain_fields,
    find_recipe,
    list_recipes,
    load_recipe,
    recipe_name,
    recipes_dir,
    validate_recipe,
)
from vitscale.recipe.families import ResNetShape, ViTShape
from vitscale.recipe.field_notes import noted_keys, notes
from vitscale.recipe.fields import blocks

RECIPES = sorted(list_recipes())


def write(tmp_path: Path, text: str, name: str = "r.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("stem", RECIPES)
def test_every_shipped_recipe_is_valid_and_survives_a_round_trip(stem):
    recipe = load_recipe(stem)
    assert validate_recipe(yaml.safe_load(yaml.safe_dump(recipe.dump())), "again") == recipe
    assert differences(recipe.dump(), load_recipe(recipes_dir() / f"{stem}.yaml").dump()) == []


def test_the_default_tail_is_left_out_of_a_resolved_recipe(tmp_path):
    """Recipes that were resolved before there was one stay as they were."""
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert "tail" not in recipe.dump()["checkpoint"] and recipe.checkpoint.tail.steps == 50
    for tail in ("null", "{steps: 7}"):
        other = load_recipe(write(tmp_path, MINIMAL), [f"checkpoint.tail={tail}"])
        assert "tail" in other.dump()["checkpoint"] and validate_recipe(other.dump(), "again") == other


def test_recipes_of_a_folder_are_named_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = load_recipe("finetune/pets")
    assert load_recipe("recipes/finetune/pets.yaml") == load_recipe("finetune/pets.yaml") == whole
    (tmp_path / "own.yaml").write_text("extends: finetune/pets.yaml\nseed: 7\n")
    assert load_recipe("own.yaml") == whole.model_copy(update={"seed": 7})
    for name in ("pets", "finetune/pet", "elsewhere/pets"):
        with pytest.raises(RecipeError, match="'finetune/pets'"):
            load_recipe(name)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("extends: finetune/pets.yaml\n")
    with pytest.raises(RecipeError, match=r"run/recipe\.yaml"):
        load_recipe("run")
    for name in ("base/finetuning", "finetune", "finetune/../h14_jft"):
        with pytest.raises(RecipeError):
            load_recipe(name)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("{name: ViT-b/32}", ViTShape(32, 384, 12, 1536, 6)),  # B with every width halved (Figure 4)
        ("{name: ViT-B/32, depth: 8, width: 1024, mlp_dim: 2048, num_heads: 16}", ViTShape(32, 1024, 8, 2048, 16)),
        ("{name: ResNet152x2}", ResNetShape((3, 8, 36, 3), 2, "v2")),
        ("{name: ResNet152x2, variant: v1}", ResNetShape((3, 8, 36, 3), 2, "v1")),
        ("{name: AxialResNet50}", ResNetShape((3, 4, 6, 3), 1, "v2", "axial")),
        ("{name: R50x1+ViT-B/16}", ViTShape(1, 768, 12, 3072, 12, stem=ResNetShape((3, 4, 9), 1, "v1"))),
        ("{name: R+ViT-Ti/16}", ViTShape(8, 192, 12, 768, 3, stem=ResNetShape((), 1, "v1"))),
        ("{name: Axial-ViT-B/32}", ViTShape(32, 768, 12, 3072, 12, "axial")),
        ("{blocks: [1, 1], width_factor: 2}", ResNetShape((1, 1), 2)),
        (
            "{patch_size: 1, width: 64, depth: 2, mlp_dim: 128, num_heads: 4, blocks: [2]}",
            ViTShape(1, 64, 2, 128, 4, stem=ResNetShape((2,), 1, "v1")),
        ),
    ],
)
def test_a_model_is_a_name_or_dimensions_or_both(tmp_path, model, shape):
    recipe = load_recipe(write(tmp_path, MINIMAL.replace("{name: ViT-Ti/16}", model)))
    assert recipe.model.shape() == shape
    assert validate_recipe(recipe.dump(), "again") == recipe


def test_yaml_numbers_and_words_are_what_they_look_like(tmp_path):
    recipe = load_recipe(write(tmp_path, MINIMAL + "objective: {on: 0.9999, off: 1e-4}\n"))
    assert recipe.optimizer.lr == 1e-3
    assert (recipe.objective.on, recipe.objective.off) == (0.9999, 1e-4)


def test_a_recipe_extends_another_block_by_block(tmp_path):
    write(tmp_path, MINIMAL, "base.yaml")
    child = "extends: base.yaml\noptimizer: {weight_decay: 0.3}\nschedule: {duration: {epochs: 2}}\n"
    recipe = load_recipe(write(tmp_path, child))
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (1e-3, 0.3)
    assert recipe.schedule.duration == Duration(epochs=2)
    other_kind = "extends: base.yaml\noptimizer: {name: sgd, lr: 0.1}\n"
    assert load_recipe(write(tmp_path, other_kind)).optimizer.momentum == 0.9
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    assert "extends itself" in refused(tmp_path, "extends: r.yaml\n")


def test_settings_override_any_field_and_a_duration_changes_its_unit(tmp_path):
    settings = ["schedule.duration.epochs=3", "schedule.warmup.steps=7", "data.crop.area=[0.2, 1]"]
    recipe = load_recipe(write(tmp_path, MINIMAL), settings)
    assert recipe.schedule.duration == Duration(epochs=3)
    assert recipe.schedule.warmup == Duration(steps=7)
    assert recipe.data.crop.area == [0.2, 1]


def test_another_model_keeps_the_rest_of_its_block(tmp_path):
    settings = ["model.dropout=0.1", "model.num_classes=9", "model.name=ViT-S/16"]
    model = load_recipe(write(tmp_path, MINIMAL), settings).model
    assert (model.name, model.dropout, model.num_classes) == ("ViT-S/16", 0.1, 9)


def test_a_resolved_model_has_the_keys_that_recipes_always_had_whatever_its_family():
    resnet, vit = (load_recipe(stem).dump()["model"] for stem in ("r50x1_jft", "b16_jft"))
    assert list(vit)[: len(resnet)] == list(resnet)
    assert (resnet["patch_size"], resnet["dropout"], vit["mixing"]) == (None, 0.0, None)
    assert resnet["position"] == {"kind": "1d", "at": "stem"}


def test_durations_in_all_units():
    assert Duration(steps=5).to_steps(1000, 100) == 5
    assert Duration(epochs=2.5).to_steps(1050, 100) == 25
    assert Duration(examples=1099).to_steps(1050, 100) == 10


def test_epochs_are_rounded_as_decimals():
    """In binary fractions 0.29 of 100 is 28.999999999999996; parts of a step are left out."""
    for steps in (1, 7, 10, 100, 312, 1000, 73_974, 1_035_636):
        for hundredths in range(1, 1500):
            found = Duration(epochs=hundredths / 100).to_steps(steps * 8 + 3, 8)
            assert found == hundredths * steps // 100, (hundredths, steps)
        for parts in (3, 7, 9, 11):
            assert Duration(epochs=2 / parts).to_steps(parts * steps, 1) == 2 * steps


def test_micro_batch_is_the_largest_divisor_that_fits(tmp_path):
    cases = [(4096, 8, 128, (128, 4)), (4096, 8, "auto", (128, 4)), (96, 2, 20, (16, 3)), (7, 1, 4, (1, 7))]
    for global_batch, world, micro_max, expected in [*cases, (64, 64, 128, (1, 1))]:
        settings = [f"batch.global={global_batch}", f"batch.micro_max={micro_max}"]
        assert load_recipe(write(tmp_path, MINIMAL), settings).batch.split(world) == expected
    with pytest.raises(RecipeError, match=r"\b64\b.*\b3 ranks"):
        load_recipe(write(tmp_path, MINIMAL)).batch.split(3)


def test_differences_ignore_how_and_name_what(tmp_path):
    old = load_recipe(write(tmp_path, MINIMAL)).dump()
    faster = ["parallelism.zero_stage=3", "batch.micro_max=2", "logging.every=1", "data.threads=4", "checkpoint.keep=9"]
    assert differences(old, load_recipe(write(tmp_path, MINIMAL), faster).dump()) == []
    other = load_recipe(write(tmp_path, MINIMAL), ["optimizer.lr=2e-3", "seed=1"]).dump()
    assert differences(old, other) == ["optimizer.lr: 0.001 -> 0.002", "seed: 0 -> 1"]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory and a home of our own, and datasets A and B of the same names."""
    monkeypatch.delenv("VITSCALE_DATA_ROOT", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("a", "b", "c"):
        (tmp_path / name / "jft300m" / "train").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    (tmp_path / "home" / ".config" / "vitscale").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_a_dataset_without_a_place_says_how_to_give_one(elsewhere):
    recipe = load_recipe(write(elsewhere, MINIMAL))
    with pytest.raises(RecipeError, match=r"data\.root=DIR.*VITSCALE_DATA_ROOT.*jft300m.*datasets\.yaml"):
        recipe.dataset_path("jft300m/train")


def test_the_nearest_word_on_where_a_dataset_is_counts(elsewhere, monkeypatch):
    recipe = load_recipe(write(elsewhere, MINIMAL))
    monkeypatch.setenv("VITSCALE_DATA_ROOT", str(elsewhere / "a"))
    assert recipe.dataset_path("jft300m/train") == str(elsewhere / "a" / "jft300m" / "train")
    write(elsewhere / "home" / ".config" / "vitscale", f"jft300m: {elsewhere}/b/jft300m", "datasets.yaml")
    assert recipe.dataset_path("jft300m/train") == str(elsewhere / "b" / "jft300m" / "train")
    assert recipe.dataset_path("jft300m") == str(elsewhere / "b" / "jft300m")
    write(elsewhere / "work", "jft300m/train: ../c/jft300m/train  # beside this file", "datasets.yaml")
    assert Path(recipe.dataset_path("jft300m/train")).resolve() == elsewhere / "c" / "jft300m" / "train"
    rooted = load_recipe(write(elsewhere, MINIMAL), [f"data.root={elsewhere / 'a'}"])
    assert rooted.dataset_path("jft300m/train") == str(elsewhere / "a" / "jft300m" / "train")
    with pytest.raises(DataError, match=r"a/imagenet21k .*VITSCALE_DATA_ROOT"):
        recipe.dataset_path("imagenet21k")
    write(elsewhere / "work", "# nothing yet", "datasets.yaml")
    assert recipe.dataset_path("jft300m/train") == str(elsewhere / "b" / "jft300m" / "train")


def test_a_dataset_may_be_at_a_url_and_nobody_is_asked_for_it(elsewhere, monkeypatch):
    recipe = load_recipe(write(elsewhere, MINIMAL))
    monkeypatch.setenv("VITSCALE_DATA_ROOT", "s3://bucket/variable/")
    assert recipe.dataset_path("jft300m/train") == "s3://bucket/variable/jft300m/train"
    assert recipe.dataset_path("s3://other/ds/train/") == "s3://other/ds/train"
    write(elsewhere / "work", "jft300m: gs://home/jft", "datasets.yaml")
    assert recipe.dataset_path("jft300m/train") == "gs://home/jft/train"
    assert recipe.dataset_path("jft300m") == "gs://home/jft"
    rooted = load_recipe(write(elsewhere, MINIMAL), ["data.root=s3://root/in"])
    assert rooted.dataset_path("jft300m/train") == "s3://root/in/jft300m/train"
    assert rooted.dataset_path(str(elsewhere / "a")) == str(elsewhere / "a")
    local = load_recipe(write(elsewhere, MINIMAL), [f"data.root=file://{elsewhere}/a"])
    assert local.dataset_path("jft300m/train") == str(elsewhere / "a" / "jft300m" / "train")
    with pytest.raises(DataError, match=str(elsewhere / "none")):
        local.dataset_path(f"file://{elsewhere}/none")


def test_the_cache_is_in_the_nearest_folder_that_is_named(elsewhere, monkeypatch):
    monkeypatch.delenv("VITSCALE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    cache = load_recipe(write(elsewhere, MINIMAL)).data.cache
    assert cache.limit_gb == 100 and cache.folder() == elsewhere / "home" / ".cache" / "vitscale"
    monkeypatch.setenv("VITSCALE_CACHE", "scratch")
    assert cache.folder() == elsewhere / "work" / "scratch"
    named = load_recipe(write(elsewhere, MINIMAL), ["data.cache={dir: ~/mine, limit_gb: 0.5}"])
    assert named.data.cache.folder() == elsewhere / "home" / "mine" and named.data.cache.limit_gb == 0.5
    assert differences(load_recipe(write(elsewhere, MINIMAL)).dump(), named.dump()) == []


def test_a_user_without_a_home_is_no_error(elsewhere, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("VITSCALE_DATA_ROOT", str(elsewhere / "a"))
    recipe = load_recipe(write(elsewhere, MINIMAL))
    assert recipe.dataset_path("jft300m/train") == str(elsewhere / "a" / "jft300m" / "train")


@pytest.mark.parametrize("dataset", ["~nosuchuser/train", "x" * 5000, "a/../../b"])
def test_an_odd_dataset_is_an_error_and_no_trace(elsewhere, dataset):
    with pytest.raises(RecipeError, match="dataset"):
        load_recipe(write(elsewhere, MINIMAL), [f"data.root={elsewhere}"]).dataset_path(dataset)


@pytest.mark.parametrize("text", ["- jft300m", "jft300m: [a, b]", "jft300m: 3", "{", "jft300m: ''", "jft300m: ~"])
def test_a_wrong_datasets_file_is_an_error(elsewhere, text):
    write(elsewhere / "work", text, "datasets.yaml")
    with pytest.raises(RecipeError, match=r"datasets\.yaml"):
        load_recipe(write(elsewhere, MINIMAL)).dataset_path("jft300m/train")


@pytest.mark.parametrize(
    ("asked", "meant"), [("h14_jtf", "h14_jft"), ("photos", "photos.yaml"), ("photos.yml", "photos.yaml"), ("a", None)]
)
def test_an_unknown_recipe_suggests_the_nearest(tmp_path, monkeypatch, asked, meant):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, MINIMAL, "photos.yaml")
    with pytest.raises(RecipeError) as caught:
        load_recipe(asked)
    assert f"did you mean {meant!r}" in str(caught.value) if meant else "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("jft300m/trian", "jft300m/train"),
        ("jft30m/train", "jft300m/train"),
        ("./a/jft300m/trains", "./a/jft300m/train"),
    ],
)
def test_a_missing_dataset_suggests_the_nearest_and_says_where_it_was_looked_for(elsewhere, monkeypatch, asked, meant):
    monkeypatch.chdir(elsewhere)
    recipe = load_recipe(write(elsewhere, MINIMAL), ["data.root=a"])
    with pytest.raises(DataError) as caught:
        recipe.dataset_path(asked)
    assert f"did you mean {meant!r}?" in str(caught.value) and str(elsewhere / "a") in str(caught.value)
    with pytest.raises(DataError) as caught:
        recipe.dataset_path("nothing/like/it")
    assert "did you mean" not in str(caught.value)


def test_a_dataset_here_that_was_taken_for_a_name_is_told(elsewhere, monkeypatch):
    (elsewhere / "photos" / "train").mkdir(parents=True)
    (elsewhere / "photos" / "train" / "manifest.json").touch()
    monkeypatch.chdir(elsewhere)
    for overrides in ([], ["data.root=a"]):
        with pytest.raises((RecipeError, DataError), match=r"\./photos/train$"):
            load_recipe(write(elsewhere, MINIMAL), overrides).dataset_path("photos/train")


# ---- What fields mean ------------------------------------------------------------------------------------------------


def blocks_in(annotation: typing.Any) -> list[type[BaseModel]]:
    """The blocks that a field with this annotation may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [block for inner in typing.get_args(annotation) for block in blocks_in(inner)]


def test_every_field_is_explained():
    explained = explain_fields()
    meanings = {field.key: field.meaning for block in blocks() for field in block.fields}
    left: list[tuple[str, type[BaseModel]]] = [("", Recipe)]
    while left:
        key, block = left.pop()
        for name, field in block.model_fields.items():
            path = f"{key}{field.alias or name}"
            below = [inner for inner in blocks_in(field.annotation) if inner is not Duration]
            if below:
                left += [(f"{path}.N." if "list" in str(field.annotation) else f"{path}.", inner) for inner in below]
                assert all(inner.__doc__ for inner in below)
            else:
                for teachers, place in (("model", "model"), ("normalise", "data.normalise")):
                    path = path.replace(f"objective.teacher.{teachers}.", f"{place}.")  # it says so there
                assert meanings[path] and f"`{path}` (" in explained, path


def test_the_page_on_fields_is_what_the_command_prints():
    page = Path(__file__).parent.parent / "docs" / "recipe.md"
    assert page.read_text() == explain_fields() + "\n", "run: vitscale recipe --explain > docs/recipe.md"
    assert f"`{ENTRY_POINTS}`" in page.read_text()


def test_a_field_is_explained_by_its_key_or_its_last_part():
    text = explain_fields("data.stall_s")
    assert "300" in text and "above 0" in text and text == explain_fields("stall_s")
    assert "data.image_size" in explain_fields("data") and "optimizer.lr" not in explain_fields("data")
    assert "schedule.duration" in explain_fields("schedule.duration.epochs")
    assert "tasks.N.name" in explain_fields("evaluation.fewshot.tasks.0.name")
    with pytest.raises(RecipeError, match=r"'optimizer\.lr'"):
        explain_fields("learning_rate")


@pytest.mark.parametrize("key", ["batch.global", "optimizer.lr", "schedule.duration"])
def test_one_field_is_explained_with_its_unit_and_where_the_paper_has_it(key):
    first, *rows = explain_fields(key).splitlines()
    named = {row.strip().partition("  ")[0] for row in rows if not row.startswith("   ")}
    assert first == key and {"type", "default", "meaning", "touches", "resuming", "the paper"} <= named


def test_notes_are_of_fields_that_are_there_and_every_number_has_its_unit():
    fields = [field for block in blocks() for field in block.fields]
    assert noted_keys() <= {field.key for field in fields}
    for field in fields:
        if re.search(r"\b(integers?|numbers?)\b", field.kind):
            assert notes(field.key).unit, field.key


# ---- Two recipes -----------------------------------------------------------------------------------------------------


def test_two_recipes_are_compared_as_diff_does_it(tmp_path, capsys):
    one, other = write(tmp_path, MINIMAL, "one.yaml"), write(tmp_path, MINIMAL + "\nseed: 7\n", "other.yaml")
    show_difference([str(one), str(one)], [])
    capsys.readouterr()
    with pytest.raises(typer.Exit) as ended:
        show_difference([str(one), str(other)], [])
    assert ended.value.exit_code == 1 and capsys.readouterr().out == "seed: 0 -> 7\n"
    show_difference([str(one), str(other)], ["seed=3"])
    for names in ([], [str(one)], [str(one)] * 3):
        with pytest.raises(RecipeError):
            show_difference(names, [])


# ---- Names -----------------------------------------------------------------------------------------------------------


def test_a_recipe_that_comes_along_is_called_by_its_name_others_by_their_path(tmp_path):
    for name in list_recipes():
        assert recipe_name(find_recipe(name)) == name
    assert recipe_name(tmp_path / "b16_jft.yaml") == str(tmp_path / "b16_jft.yaml")


def test_a_run_that_drew_while_it_trained_is_still_read():
    content = load_recipe("b16_jft").dump()
    content["evaluation"]["inspect"] = {"every": {"steps": 5}, "images": "photos", "count": 128}
    assert validate_recipe(content, "the run's recipe") == load_recipe("b16_jft")
