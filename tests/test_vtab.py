"""VTAB-1k: the means that the paper prints, those that others print, and the table that has both."""

import json

import pytest

from vitscale.flops.published import table_2, table_9
from vitscale.ground.errors import DataError
from vitscale.ground.table import render
from vitscale.ground.vtab import GROUPS, OVER_GROUPS, OVER_TASKS, TASKS, vtab_means, vtab_table


def test_tasks_are_the_columns_of_table_9():
    for scores in table_9().values():
        assert list(scores) == [*TASKS, "mean"]
    assert [sum(task.group == group for task in TASKS.values()) for group in GROUPS] == [7, 4, 8]


@pytest.mark.parametrize(
    ("run", "over_tasks", "over_groups"),
    [
        (("ViT-H/14", "jft300m"), 77.63, 79.57),
        (("ViT-L/16", "jft300m"), 76.29, 78.41),
        (("ViT-L/16", "imagenet21k"), 72.71, 75.14),
    ],
)
def test_both_means_of_table_9(run, over_tasks, over_groups):
    means = vtab_means(table_9()[run])
    assert round(means[OVER_TASKS], 2) == over_tasks and round(means[OVER_GROUPS], 2) == over_groups
    assert means[OVER_TASKS] == pytest.approx(table_9()[run]["mean"], abs=0.051)
    vtab = {(row.model, row.pretraining): row.vtab for row in table_2()}
    assert means[OVER_TASKS] == pytest.approx(vtab[run], abs=0.011)
    if run == ("ViT-H/14", "jft300m"):
        assert [round(means[group], 1) for group in GROUPS] == [86.7, 87.0, 65.0]  # in Figure 2


def test_no_mean_over_fewer_tasks():
    scores = {name: 50.0 for name in TASKS if name != "dmlab"}
    with pytest.raises(DataError, match="dmlab"):
        vtab_means(scores)
    rows = {(row["group"], row["task"]): row["ours"] for row in vtab_table({"ours": scores}).rows}
    assert rows["natural", "mean"] == rows["specialized", "mean"] == 50
    for cell in (("structured", "dmlab"), ("structured", "mean"), ("all", OVER_TASKS), ("all", OVER_GROUPS)):
        assert rows[cell] is None


def test_a_table_by_group_beside_the_paper(capsys):
    ours = {name: float(number) for number, name in enumerate(TASKS)}
    render(vtab_table({"ours": ours, "ViT-H/14": table_9()["ViT-H/14", "jft300m"]}), "json")
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 19 + 3 + 2
    by_name = {(row["group"], row["task"]): row for row in rows}
    assert by_name["natural", "mean"]["ours"] == 3 and by_name["specialized", "mean"]["ours"] == 8.5
    assert by_name["structured", "mean"]["ours"] == 14.5
    assert by_name["all", OVER_TASKS]["ours"] == 9
    assert by_name["all", OVER_GROUPS]["ours"] == pytest.approx(26 / 3)
    assert by_name["all", OVER_TASKS]["ViT-H/14"] == pytest.approx(77.63, abs=0.005)
    render(vtab_table({"ours": ours}), "table")
    printed = capsys.readouterr().out
    assert OVER_TASKS in printed and OVER_GROUPS in printed
