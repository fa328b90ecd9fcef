"""What the headers of recipes promise: the computed exaFLOPs, and the paper's results as its tables have them."""

import re

import pytest

from vitscale.flops.estimate import estimate
from vitscale.flops.matching import position_row, state_of_the_art_row, transfer_row
from vitscale.flops.published import table_5, table_6, table_7
from vitscale.recipe import load_recipe, recipes_dir

ACCURACIES = {
    "ImageNet": "imagenet",
    "ImageNet ReaL": "imagenet_real",
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
    "Pets": "pets",
    "Flowers": "flowers",
}
RECIPES = sorted(recipes_dir().glob("*.yaml"))
OF_THE_PAPER = [file for file in RECIPES if file.stem not in ("demo", "vit4_cifar10")]


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


@pytest.mark.parametrize("file", OF_THE_PAPER, ids=lambda file: file.stem)
def test_expected_compute(estimates, file):
    expected = re.findall(r"Expected compute: ([\d,.]*\d) exaFLOPs(?: \(the paper's: ([\d,]+)\))?\.", header_of(file))
    assert len(expected) == 1
    (computed, published), one = expected[0], estimates[file]
    assert is_rounded(one.exaflops, computed)
    assert (one.published is None) == (published == "")
    if published:
        assert one.published.exaflops == float(published.replace(",", ""))


@pytest.mark.parametrize("file", OF_THE_PAPER, ids=lambda file: file.stem)
def test_results(estimates, file):
    header, one = header_of(file), estimates[file]
    results = re.search(
        r"The paper reports, after fine-tuning(?: at 384 px)? \(Table (\d)\): ([^;]*?)[;.](?: |$)", header
    )
    found = transfer_row(one.recipe, one.images)
    assert (results is None) == (found is None)
    if results is not None:
        table, row = found
        printed = dict(part.rsplit(" ", 1) for part in results[2].split(", "))
        assert int(results[1]) == table
        expected = {title: getattr(row, name) for title, name in ACCURACIES.items()}
        assert {title: float(value) for title, value in printed.items()} == {
            title: value for title, value in expected.items() if value is not None
        }


@pytest.mark.parametrize("file", OF_THE_PAPER, ids=lambda file: file.stem)
def test_results_of_table_8(estimates, file):
    printed = re.findall(r"ImageNet 5-shot ([\d.]*\d) \(Table 8\)", header_of(file))
    row = position_row(estimates[file].recipe, estimates[file].images)
    if printed:
        assert row is not None and [row.imagenet_5shot] == [float(value) for value in printed]
    else:
        # The default of all other studies is a row of this one as well, which its recipe need not say.
        assert row is None or (row.position, row.at) == ("1d", "stem")


@pytest.mark.parametrize("file", OF_THE_PAPER, ids=lambda file: file.stem)
def test_results_of_table_2(estimates, file):
    printed = re.findall(r"ImageNet ([\d.]+) at \d+ px with Polyak averaging \(Table 2\)", header_of(file))
    if printed:
        row = state_of_the_art_row(estimates[file].recipe)
        assert row is not None and [row.imagenet] == [float(value) for value in printed]


def test_every_run_of_the_tables_has_a_recipe(estimates):
    found = {id(row[1]) for one in estimates.values() if (row := transfer_row(one.recipe, one.images)) is not None}
    expected = [*table_6(), *(row for row in table_7() if row.optimizer == "sgd")]
    expected += [row for row in table_5() if row.pretraining != "jft300m"]
    assert found == {id(row) for row in expected}
