"""VTAB-1k: its 19 tasks in three groups, and the means and table of results by group."""

from collections.abc import Mapping
from statistics import mean
from typing import Literal, NamedTuple, get_args

from vitscale.ground.errors import DataError
from vitscale.ground.table import Column, ResultTable, Row, number

Group = Literal["natural", "specialized", "structured"]
GROUPS: tuple[Group, ...] = get_args(Group)


class VtabTask(NamedTuple):
    """One task.

    Attributes:
        name: its name in results, recipes and the columns of the paper's Table 9.
        group: its group, by what its images are like.
        num_classes: the number of its classes.
    """

    name: str
    group: Group
    num_classes: int


TASKS: Mapping[str, VtabTask] = {
    task.name: task
    for task in (
        VtabTask("caltech101", "natural", 102),
        VtabTask("cifar100", "natural", 100),
        VtabTask("dtd", "natural", 47),
        VtabTask("flowers102", "natural", 102),
        VtabTask("pets", "natural", 37),
        VtabTask("sun397", "natural", 397),
        VtabTask("svhn", "natural", 10),
        VtabTask("camelyon", "specialized", 2),
        VtabTask("eurosat", "specialized", 10),
        VtabTask("resisc45", "specialized", 45),
        VtabTask("retinopathy", "specialized", 5),
        VtabTask("clevr_count", "structured", 8),
        VtabTask("clevr_dist", "structured", 6),
        VtabTask("dmlab", "structured", 6),
        VtabTask("dspr_loc", "structured", 16),
        VtabTask("dspr_ori", "structured", 16),
        VtabTask("kitti_dist", "structured", 4),
        VtabTask("snorb_azim", "structured", 18),
        VtabTask("snorb_elev", "structured", 9),
    )
}
"""All tasks by name, in the order of Table 9."""

OVER_TASKS = "mean over 19 tasks"
OVER_GROUPS = "mean of the 3 group means"


def vtab_means(results: Mapping[str, float]) -> dict[str, float]:
    """The groups' means, by name; OVER_TASKS, the paper's mean; and OVER_GROUPS, the mean that most others print.

    Args:
        results: task -> top-1, in any unit; other keys, such as a printed `mean`, are ignored.

    Raises DataError if a task is missing: a mean over fewer tasks would be another quantity under the same name.
    """
    if missing := [name for name in TASKS if name not in results]:
        raise DataError(f"VTAB-1k: no result of {', '.join(missing)}; its means are over all {len(TASKS)} tasks")
    groups = [mean(results[name] for name in _names(group)) for group in GROUPS]
    over_all = {OVER_TASKS: mean(results[name] for name in TASKS), OVER_GROUPS: mean(groups)}
    return dict(zip(GROUPS, groups, strict=True)) | over_all


def vtab_table(runs: Mapping[str, Mapping[str, float]]) -> ResultTable:
    """Results side by side, by group, each group with its mean; at the end the two means over all tasks.

    Args:
        runs: title of a column -> task -> top-1 in percent, measured or published. Tasks may be missing; then the means
            that need them are missing, too.
    """
    columns = [Column("group", "group", is_text=True), Column("task", "task", is_text=True)]
    columns += [Column(title, title, number(2)) for title in runs]
    rows: list[Row] = []
    for group in GROUPS:
        names = _names(group)
        rows += [{"group": group, "task": name} | {title: runs[title].get(name) for title in runs} for name in names]
        whole = {title: results for title, results in runs.items() if all(name in results for name in names)}
        means = {title: mean(results[name] for name in names) for title, results in whole.items()}
        rows.append({"group": group, "task": "mean"} | {title: means.get(title) for title in runs})
    complete = {title: vtab_means(results) for title, results in runs.items() if all(name in results for name in TASKS)}
    for what in (OVER_TASKS, OVER_GROUPS):
        rows.append({"group": "all", "task": what} | {title: complete.get(title, {}).get(what) for title in runs})
    note = f"The paper's score is the {OVER_TASKS}; most later papers print the {OVER_GROUPS}."
    return ResultTable(columns, rows, notes=(note,), groups=[len(_names(group)) + 1 for group in GROUPS])


def _names(group: Group) -> list[str]:
    return [task.name for task in TASKS.values() if task.group == group]
