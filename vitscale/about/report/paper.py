"""What the paper reports for the same tasks: its Tables 2, 5, 6 and 9, and the figures drawn from them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vitscale.flops.published import table_2, table_5, table_6, table_9
from vitscale.ground.vtab import TASKS, vtab_table

TOP1 = "validation/top1"
VTAB = "vtab/"
# Tasks of Tables 2, 5 and 6, with the images of their test sets (appendix B.1.1 names the splits; sizes are the
# data sets' own).
TEST_IMAGES = {"imagenet": 50_000, "cifar10": 10_000, "cifar100": 10_000, "pets": 3_669, "flowers": 6_149}
_TABLES = {
    "2": ("comparison with the state of the art; mean and standard deviation of three fine-tuning runs", table_2),
    "5": ("pre-training on ImageNet, ImageNet-21k and JFT-300M; fine-tuned at 384 pixels (Figure 3)", table_5),
    "6": ("the scaling study on JFT-300M (Figure 5)", table_6),
}


def transfers(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of the kind that the paper's tables have: top-1, after fine-tuning, not on a development split."""
    return [
        result
        for result in results
        if result["metric"] == TOP1
        and result["split"] != "dev"
        and result["begins_with"] is not None
        and result["task"] is not None
    ]


def beside_the_paper(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each table that concerns a task of the results: the task's results, and the paper's rows, in percent.

    A result's `published` is the paper's value for the same model, pre-trained on the data set of the same name.
    """
    own = transfers(results)
    found = []
    for number, (about, rows) in _TABLES.items():
        tasks = [task for task in TEST_IMAGES if any(result["task"] == task for result in own)]
        if not tasks:
            continue
        published = [
            {key: value for key, value in asdict(row).items() if _concerns(key, tasks)}  # type: ignore[call-overload]
            for row in rows()
        ]
        found.append(
            {
                "table": number,
                "about": about,
                "tasks": tasks,
                "results": [_compared(result, published, result["task"]) for result in own if result["task"] in tasks],
                "rows": published,
            }
        )
    of_vtab = [result for result in own if result["task"].removeprefix(VTAB) in TASKS and VTAB in result["task"]]
    if of_vtab:
        found.append({"table": "9", "about": "VTAB-1k, 1,000 training images a task", **_of_vtab(of_vtab)})
    return found


def _of_vtab(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Top-1 in percent by task and group: a column for each model here, with its policies, and the paper's three."""
    columns: dict[str, dict[str, float]] = {}
    policies: dict[str, list[str]] = {}
    for result in results:
        title = f"{result['part'] or result['label']}: begins with {result['begins_with']}"
        columns.setdefault(title, {})[result["task"].removeprefix(VTAB)] = 100 * result["mean"]
        policies[title] = sorted({*policies.get(title, []), result["policy"]})
    for (model, pretraining), row in table_9().items():
        columns[f"{model}, {pretraining}\n(Table 9)"] = {task: row[task] for task in TASKS}
    by_group = vtab_table(columns)
    return {"columns": list(columns), "policies": policies, "by_group": by_group.bare_rows(), "results": list(results)}


def _concerns(key: str, tasks: Sequence[str]) -> bool:
    of_task = key.removesuffix("_std")
    return of_task in tasks or key in ("name", "model", "pretraining", "epochs", "exaflops", "tpuv3_core_days")


def _compared(result: dict[str, Any], rows: Sequence[dict[str, Any]], task: str) -> dict[str, Any]:
    pretraining = (result["pretraining_data"] or "").partition("/")[0]
    same = [
        row[task]
        for row in rows
        if row["model"] == result["model"]
        and row.get("pretraining", "jft300m") == pretraining
        and row[task] is not None
    ]
    published = same[0] if len(same) == 1 else None
    return {
        **result,
        "published": published,
        "difference": None if published is None else 100 * result["mean"] - published,
        "test_images_of_the_paper": TEST_IMAGES[task],
    }
