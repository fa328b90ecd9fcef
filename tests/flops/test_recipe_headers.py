"""What the headers of recipes promise: the computed exaFLOPs, and the paper's results as its tables have them."""

import re

import pytest

from vitscale.flops.estimate import estimate
from vitscale.flops.matching import position_row, transfer_row
from vitscale.flops.published import table_2, table_5, table_6, table_7, table_8
from vitscale.recipe import load_recipe, override, recipes_dir

ACCURACIES = {
    "ImageNet": "imagenet",
    "ImageNet ReaL": "imagenet_real",
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
    "Pets": "pets",
    "Flowers": "flowers",
}
RECIPES = sorted(recipes_dir().glob("*.yaml"))
OF_THE_PAPER = [file for file in RECIPES if file.stem not in ("demo", "vit4_cifar10") and "miniature" not in file.stem]
# Whose model does not depend on the run.
FINE_TUNING = sorted(
    file for of in ("deit3", "vit5", "mae", "swin") for file in (recipes_dir() / "finetune").glob(f"{of}_*.yaml")
)
IMAGENET = 1_281_167


def header_of(file) -> str:
    """The comment on top, in one line."""
    lines = file.read_text().splitlines()
    end = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("#").strip() for line in lines[:end])


def is_rounded(value: float, printed: str) -> bool:
    decimals = len(printed.partition(".")[2])
    return round(value, decimals) == float(printed.replace(",", ""))


@pytest.fixture(scope="module")
def estimates():
    return {file: estimate(file.stem, load_recipe(file)) for file in OF_THE_PAPER}


def test_expected_compute(estimates):
    for file, one in estimates.items():
        pattern = r"Expected compute: ([\d,.]*\d) exaFLOPs(?: \(the paper's: ([\d,]+)\))?\."
        [(computed, published)] = re.findall(pattern, header_of(file))
        assert is_rounded(one.exaflops, computed), file
        if published:
            assert one.published is not None and one.published.exaflops == float(published.replace(",", "")), file


def test_expected_compute_of_fine_tuning_on_imagenet():
    for file in FINE_TUNING:
        recipe = override(load_recipe(file).dump(), ["model.num_classes=1000"], file.stem)
        [printed] = re.findall(r"Expected compute: ([\d.]*\d) exaFLOPs\.", header_of(file))
        assert is_rounded(estimate(file.stem, recipe, IMAGENET).exaflops, printed), file


def printed_results(file) -> tuple[int, dict[str, float]] | None:
    """(number of the table, accuracies by title) that a header prints of fine-tuning."""
    pattern = r"The paper reports, after fine-tuning(?: at 384 px)? \(Table (\d)\): ([^;]*?)[;.](?: |$)"
    if (results := re.search(pattern, header_of(file))) is None:
        return None
    return int(results[1]), {
        title: float(value) for title, value in re.findall(r"([^,]+?) ([\d.]+)(?:, |$)", results[2])
    }


def test_results(estimates):
    for file in filter(printed_results, OF_THE_PAPER):
        table, row = transfer_row(estimates[file].recipe, estimates[file].images)
        expected = {title: value for title, name in ACCURACIES.items() if (value := getattr(row, name)) is not None}
        assert printed_results(file) == (table, expected), file


def test_every_run_of_the_tables_has_a_recipe_and_is_printed(estimates):
    """By the recipe that repeats it; where two do, as for two studies, by one of them at least."""
    rows, printed, published = set(), set(), set()
    for file, one in estimates.items():
        if (found := transfer_row(one.recipe, one.images)) is not None:
            rows.add(id(found[1]))
            printed |= {id(found[1])} if printed_results(file) is not None else set()
        if one.published is not None and "(the paper's: " in header_of(file):
            published.add(id(one.published))
    expected = [*table_6(), *(row for row in table_7() if row.optimizer == "sgd")]
    expected += [row for row in table_5() if row.pretraining != "jft300m"]
    assert printed == rows == {id(row) for row in expected}
    assert published == {id(row) for row in table_6()}


def test_results_of_table_8(estimates):
    printed = {}
    for file, one in estimates.items():
        values = re.findall(r"ImageNet 5-shot ([\d.]*\d) \(Table 8\)", header_of(file))
        if values:
            row = position_row(one.recipe, one.images)
            assert row is not None and [row.imagenet_5shot] == [float(value) for value in values], file
            assert 5 in one.recipe.evaluation.fewshot.shots, file
            printed[row.position, row.at] = float(values[0])
    assert printed == {(row.position, row.at): row.imagenet_5shot for row in table_8()}


def test_results_of_table_2(estimates):
    printed = {}
    for file, one in estimates.items():
        if "(Table 2)" in (header := header_of(file)):
            values = re.findall(r"ImageNet ([\d.]+) at \d+ px with Polyak averaging \(Table 2\)", header)
            printed[file.stem, one.recipe.model.name] = list(map(float, values))
    of = {row.model: row.imagenet for row in table_2() if row.pretraining == "jft300m"}
    expected = {("h14_jft", "ViT-H/14"), ("l16_jft_14ep", "ViT-L/16")}
    assert printed == {(stem, model): [of[model]] for stem, model in expected}
