"""What the paper reports for the same tasks: its Tables 2, 5, 6 and 9, and the figures drawn from them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vitscale.about.report.results import Result
from vitscale.flops.published import table_2, table_5, table_6, table_9
from vitscale.ground.vtab import TASKS, vtab_table

TOP1 = "validation/top1"
VTAB = "vtab/"
# Tasks of Tables 2, 5 and 6, with the images of their test sets (appendix B.1.1 names the splits; sizes are the
# data sets' own).
TEST_IMAGES = {"imagenet": 50_000, "cifar10": 10_000, "cifar100": 10_000, "pets": 3_669, "flowers": 6_149}
_KEYS = ("name", "model", "pretraining", "epochs", "exaflops", "tpuv3_core_days")  # of rows, beside those of tasks
_TABLES = {
    "2": ("comparison with the state of the art; mean and standard deviation of three fine-tuning runs", table_2),
    "5": ("pre-training on ImageNet, ImageNet-21k and JFT-300M; fine-tuned at 384 pixels (Figure 3)", table_5),
    "6": ("the scaling study on JFT-300M (Figure 5)", table_6),
}


@dataclass(frozen=True, kw_only=True)
class Compared(Result):
    """A result beside the paper's value in percent, that of the same model and pre-training data."""

    published: float | None
    difference: float | None
    test_images_of_the_paper: int


@dataclass(frozen=True)
class PaperTable:
    """One of the paper's tables with the results for its tasks; its rows have what concerns these, in percent."""

    table: str
    about: str
    tasks: list[str]
    results: list[Compared]
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class VtabTable:
    """The results for tasks of VTAB-1k beside the paper's Table 9."""

    table: str
    about: str
    columns: list[str]  # titles: one for each model here, and the paper's three
    policies: dict[str, list[str]]  # title -> those of that model's results
    by_group: list[dict[str, Any]]  # `group`, `task` and, by title, top-1 in percent
    results: list[Result]


def transfers(results: Sequence[Result]) -> list[Result]:
    """The results of the kind that the paper's tables have: top-1, after fine-tuning, not on a development split."""
    return [result for result in results if is_tested_top1(result) and None not in (result.begins_with, result.task)]


def is_tested_top1(result: Result) -> bool:
    """Whether it is a top-1 accuracy on anything but a development split."""
    return result.metric == TOP1 and result.split != "dev"


def beside_the_paper(results: Sequence[Result]) -> list[PaperTable | VtabTable]:
    """Each table that concerns a task of the results."""
    own = transfers(results)
    found: list[PaperTable | VtabTable] = []
    tasks = [task for task in TEST_IMAGES if any(result.task == task for result in own)]
    keys = {*_KEYS, *tasks, *(f"{task}_std" for task in tasks)}
    for number, (about, rows) in _TABLES.items() if tasks else ():
        published = [
            {key: value for key, value in asdict(row).items() if key in keys}  # type: ignore[call-overload]
            for row in rows()
        ]
        compared = [_compared(result, published, result.task) for result in own if result.task in tasks]
        found.append(PaperTable(number, about, tasks, compared, published))
    of_vtab = [result for result in own if result.task and result.task.startswith(VTAB) and _vtab_task(result) in TASKS]
    return [*found, _of_vtab(of_vtab)] if of_vtab else found


def _vtab_task(result: Result) -> str:
    return (result.task or "").removeprefix(VTAB)


def _of_vtab(results: Sequence[Result]) -> VtabTable:
    columns: dict[str, dict[str, float]] = {}
    policies: dict[str, list[str]] = {}
    for result in results:
        title = f"{result.part or result.label}: begins with {result.begins_with}"
        columns.setdefault(title, {})[_vtab_task(result)] = 100 * result.mean
        policies[title] = sorted({*policies.get(title, []), result.policy or ""})
    for (model, pretraining), row in table_9().items():
        columns[f"{model}, {pretraining}\n(Table 9)"] = {task: row[task] for task in TASKS}
    rows = vtab_table(columns).bare_rows()
    return VtabTable("9", "VTAB-1k, 1,000 training images a task", list(columns), policies, rows, list(results))


def _compared(result: Result, rows: Sequence[dict[str, Any]], task: str) -> Compared:
    pretraining = (result.pretraining_data or "").partition("/")[0]
    same = [
        row[task]
        for row in rows
        if row["model"] == result.model and row.get("pretraining", "jft300m") == pretraining and row[task] is not None
    ]
    published = same[0] if len(same) == 1 else None
    return Compared(
        **vars(result),
        published=published,
        difference=None if published is None else 100 * result.mean - published,
        test_images_of_the_paper=TEST_IMAGES[task],
    )
