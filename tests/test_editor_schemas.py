"""The JSON schemas by which editors complete and check recipes and studies: valid, current, and as strict as we are."""

import json

import jsonschema
import pytest
from test_recipe_mistakes import MINIMAL

from vitscale.about.studies.reading import list_studies, study_schema
from vitscale.recipe import json_schema, list_recipes, load_recipe, recipes_dir
from vitscale.recipe.reading import SCHEMA_LINE
from vitscale.recipe.strict_yaml import parse_yaml

SCHEMAS = {"recipe": json_schema, "study": study_schema}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_for_editors_is_the_one_in_the_repository(name):
    command = {"recipe": "vitscale recipe --schema", "study": "vitscale study schema"}[name]
    file = recipes_dir() / f"{name}.schema.json"
    assert json.loads(file.read_text()) == SCHEMAS[name](), f"run: {command} > recipes/{name}.schema.json"


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_field_of_a_schema_says_what_it_means(name):
    schema = SCHEMAS[name]()
    for block in (schema, *schema["$defs"].values()):
        for key, field in block.get("properties", {}).items():
            of_block = schema["$defs"].get(field.get("$ref", "").rpartition("/")[2], {})
            assert field.get("description") or of_block.get("description"), (block.get("title"), key)


def test_a_file_that_comes_along_names_its_schema_first_and_is_valid_by_it():
    validators = {}
    for file in recipes_dir().rglob("*.yaml"):
        first = file.read_text().partition("\n")[0]
        schema = (file.parent / first.removeprefix(SCHEMA_LINE)).resolve()
        assert first.startswith(SCHEMA_LINE) and schema.is_file(), file
        assert schema.name == ("study" if file.parent.name == "studies" else "recipe") + ".schema.json"
        if schema not in validators:
            content = json.loads(schema.read_text())
            jsonschema.Draft202012Validator.check_schema(content)
            validators[schema] = jsonschema.Draft202012Validator(content)
        validators[schema].validate(parse_yaml(file.read_text(), str(file)))
    assert len(validators) == 2


def test_the_schema_for_editors_takes_whole_recipes_and_no_typo():
    validator = jsonschema.Draft202012Validator(json_schema())
    good = parse_yaml(MINIMAL, "")
    for stem in ("b16_jft", "r50x1_jft"):
        assert validator.is_valid(load_recipe(stem).dump()), stem
    assert validator.is_valid(good)
    for bad in (
        {"modle": {}},
        {"seed": -1},
        {"extends": 3},
        {"data": {"train": 3}},
        {"model": {"name": "ViT-B/16", "widht": 3}},
        {"data": {"train": "a", "trian": "b"}},
        {"optimizer": {"name": "adamW", "lr": 1.0}},
        {"schedule": {"duration": {"hours": 3}}},
    ):
        assert not validator.is_valid(good | bad)
    assert not validator.is_valid({key: value for key, value in good.items() if key != "optimizer"})
    assert validator.is_valid({"extends": "b16_jft"})


def test_the_schema_for_editors_takes_no_typo_in_a_study():
    validator = jsonschema.Draft202012Validator(study_schema())
    part = {"recipe": "b16_jft"}
    assert validator.is_valid({"parts": {"a": part}})
    for bad in ({}, {"parts": {}}, {"parts": {"a": part | {"gird": []}}}, {"parts": {"a": part | {"seeds": [-1]}}}):
        assert not validator.is_valid(bad)


def test_a_title_is_the_first_line_behind_that_of_the_schema():
    assert list_recipes()["h14_jft"].startswith("ViT-H/14 pre-trained on JFT-300M")
    assert list_studies()["vtab1k"].startswith("VTAB-1k")
