"""Results that show themselves in a notebook. All text of theirs is shown, never obeyed."""

from collections.abc import Iterable, Mapping
from typing import Any

from vitscale.evaluation.prediction import Prediction
from vitscale.ground.page import Facts, Table, fragment
from vitscale.ground.table import Column, ResultTable


class Results(dict[str, Any]):
    """Results by name."""

    def _repr_html_(self) -> str:
        return fragment([Facts(list(_flat(self)))])


class Predictions(list[Prediction]):
    """Predictions in the order of their pictures."""

    def __init__(self, found: Iterable[Prediction]) -> None:
        super().__init__(found)

    def _repr_html_(self) -> str:
        columns = [Column("picture", "picture", is_text=True), Column("classes", "classes", is_text=True)]
        rows = [
            {"picture": each.file, "classes": ", ".join(f"{name} {share:.1%}" for name, share in each.classes)}
            for each in self
        ]
        return fragment([Table(ResultTable(columns, rows))])


def facts(rows: Mapping[str, object]) -> Facts:
    """What is known, by name; None is left out."""
    return Facts([(name, _text(value)) for name, value in rows.items() if value is not None])


def _flat(content: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}: ")
        else:
            yield f"{above}{key}", _text(value)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
