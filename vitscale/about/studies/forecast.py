"""Forecasts: what smaller runs say of the loss of a larger one, written down before it begins.

The law is loss = a C^-b of the compute C, a line in logarithms (Hestness et al., 2017; Kaplan et al., 2020), without a
loss that no compute removes: where there is one, a forecast far beyond the runs it is made from is too low.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Self

import pydantic

from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.wording import describe_mistake
from vitscale.runs.reading import read_object

METRIC = "validation/loss"
LEAST_RUNS = 3  # below this a line has no deviation from which an interval could follow
FORECASTS_FILE = "forecasts.json"
_CONFIDENCE = 0.95
_MOST = 41.0  # of a logarithm; more than any loss
_Positive = Annotated[float, pydantic.Field(gt=0, lt=1e18)]


@dataclass(frozen=True)
class Point:
    """A finished run: its exaFLOPs and its loss."""

    name: str
    exaflops: _Positive
    loss: _Positive


@dataclass(frozen=True)
class Forecast:
    """What was expected of an entry, at its planned exaFLOPs, with the ends of an interval of 95 % for one run."""

    name: str
    made_at: str
    exaflops: _Positive
    loss: _Positive
    low: _Positive
    high: _Positive
    exponent: Annotated[float, pydantic.Field(gt=-1e18, lt=1e18)]  # b
    points: Annotated[list[Point], pydantic.Field(min_length=LEAST_RUNS, max_length=2000)]

    def __post_init__(self) -> None:
        check_follows(self.points, self.exaflops, (self.loss, self.low, self.high))

    @classmethod
    def of(cls, name: str, exaflops: float, points: Sequence[Point]) -> Self:
        """Raises `RecipeError` if the points are of one compute, or too few."""
        law = Law(points)
        made_at = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(name, made_at, exaflops, *law.at(exaflops), law.exponent, list(points))


_CONTENT = pydantic.TypeAdapter(dict[str, Forecast])


class Law:
    """loss = a C^-b by least squares in logarithms."""

    def __init__(self, points: Sequence[Point]) -> None:
        xs, ys = [math.log(one.exaflops) for one in points], [math.log(one.loss) for one in points]
        self._n, self._x, self._y = len(xs), sum(xs) / len(xs), sum(ys) / len(ys)
        self._square = sum((x - self._x) ** 2 for x in xs)
        if self._n < LEAST_RUNS or self._square < 1e-12:
            raise RecipeError(f"a forecast needs {LEAST_RUNS} runs at least, of different compute, not {self._n}")
        self.exponent = -sum((x - self._x) * (y - self._y) for x, y in zip(xs, ys, strict=True)) / self._square
        residuals = [y - self._y + self.exponent * (x - self._x) for x, y in zip(xs, ys, strict=True)]
        deviation = math.sqrt(sum(each**2 for each in residuals) / (self._n - 2))
        self._reach = student_quantile(_CONFIDENCE, self._n - 2) * deviation

    def at(self, exaflops: float) -> tuple[float, float, float]:
        """(loss, low, high): the law, and the interval in which the loss of one further run is expected."""
        x = math.log(exaflops) - self._x
        middle = self._y - self.exponent * x
        reach = self._reach * math.sqrt(1 + 1 / self._n + x**2 / self._square)
        loss, low, high = (
            math.exp(max(-_MOST, min(_MOST, value))) for value in (middle, middle - reach, middle + reach)
        )
        return loss, low, high


def check_follows(points: Sequence[Point], exaflops: float, told: Sequence[float | None]) -> None:
    """Raise `ValueError` for a loss, low and high in a file that the law does not say, `RecipeError` without a law."""
    for wanted, value in zip(Law(points).at(exaflops), told, strict=True):
        if value is None or not math.isclose(value, wanted, rel_tol=1e-6):
            raise ValueError(f"a forecast of {value}, where its points say {wanted:.6g}")


def student_quantile(share: float, freedom: int) -> float:
    """t such that |T| <= t with this probability, T of Student's distribution with so many degrees of freedom.

    By bisection of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    low, high = 0.0, math.pi / 2
    while high - low > 1e-14:
        angle = (low + high) / 2
        sine, square = math.sin(angle), math.cos(angle) ** 2
        total, term = 0.0, math.cos(angle) if freedom % 2 else 1.0
        for i in range(freedom % 2, freedom, 2):
            total, term = total + term, term * square * (i + 1) / (i + 2)
        within = (angle + sine * total) * 2 / math.pi if freedom % 2 else sine * total
        low, high = (angle, high) if within < share else (low, angle)
    return math.tan(low) * math.sqrt(freedom)


def read_forecasts(folder: Path) -> dict[str, Forecast]:
    """What was expected of entries, by name; nothing where none was. Raises `DataError` for a damaged file."""
    path = folder / FORECASTS_FILE
    try:
        return _CONTENT.validate_python(read_object(path)) if path.exists() else {}
    except RecipeError as error:
        raise DataError(f"{path}: damaged: {error}") from None
    except pydantic.ValidationError as error:
        raise DataError(f"{path}: damaged: {describe_mistake(error.errors()[0])}") from None


def forecasts_text(forecasts: Mapping[str, Forecast]) -> str:
    """The content of the file."""
    return json.dumps({name: asdict(one) for name, one in forecasts.items()}, indent=1, allow_nan=False) + "\n"
