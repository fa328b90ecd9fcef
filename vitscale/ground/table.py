"""A table of results, printed in one of four forms."""

import csv
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import rich.console
from rich import box
from rich.cells import cell_len
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from vitscale.ground.safe_text import SafeStream, shown

Form = Literal["table", "json", "csv", "markdown"]
Row = dict[str, Any]

_UNLIMITED = 2**20  # characters in a line
_PIPED = 120  # characters of a table's line in a pipe, where columns can fold


class Console(rich.console.Console):
    """rich's console, whatever is printed there `shown`: of control characters, only rich's own reach a terminal."""

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout
        if isinstance(stream, SafeStream):
            options.setdefault("file", stream.rich_proxied_file)
        super().__init__(stderr=stderr, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A text from a string."""
        return super().render_str(shown(text), **options)

    def render(self, renderable: Any, options: rich.console.ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of what is printed, part by part."""
        if isinstance(renderable, Text) and (safe := shown(renderable.plain)) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = safe
        return super().render(renderable, options)


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: its key in rows, JSON and CSV, which have the bare values.
        heading: its heading for people; may have several lines.
        show: turns a value into the text that people see.
        is_text: whether it is text, aligned to the left, instead of numbers.
        spare: the priority for leaving it out on a narrow terminal, highest first; 0 always stays.
        folds: whether long cells continue on the next line.
        style: turns a value into rich's style for it; None for no style.
    """

    key: str
    heading: str
    show: Callable[[Any], str] = str
    is_text: bool = False
    spare: int = 0
    folds: bool = False
    style: Callable[[Any], str] | None = None

    @property
    def title(self) -> str:
        """The heading on one line."""
        return self.heading.replace("\n", " ")

    def cell(self, row: Row) -> str:
        """The text of a row's value that people see; empty for None."""
        return "" if row[self.key] is None else self.show(row[self.key])


@dataclass(frozen=True)
class ResultTable:
    """A table. People do not see columns without any value; programs get all columns.

    Attributes:
        columns: its columns.
        rows: its rows, each with a value for every column.
        legend: lines below the table that explain columns.
        notes: lines below the table that say about these rows what the columns cannot.
        groups: the lengths of blocks of rows that belong together.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    legend: Sequence[str] = ()
    notes: Sequence[str] = ()
    groups: Sequence[int] = ()

    def bare_rows(self) -> list[Row]:
        """The rows with the values of all columns, in the columns' order."""
        return [{column.key: row[column.key] for column in self.columns} for row in self.rows]

    def shown_columns(self) -> list[Column]:
        """The columns that people see."""
        return [column for column in self.columns if any(row[column.key] is not None for row in self.rows)]


def hanging(text: str, indent: int) -> str:
    """A text for stdout after `indent` characters, on a terminal wrapped between words below its own beginning."""
    console = Console()
    room = console.width - indent if console.is_terminal else _UNLIMITED
    return f"\n{' ' * indent}".join(textwrap.wrap(text, max(room, 1), break_long_words=False, break_on_hyphens=False))


def number(decimals: int, scale: float = 1.0) -> Callable[[float], str]:
    """Shows numbers with digits in groups of three; those that would look like zero, with three significant digits."""

    def show(value: float) -> str:
        scaled = value / scale
        if scaled == 0:
            return "0"
        return f"{scaled:,.{decimals}f}" if abs(scaled) >= 10.0**-decimals else f"{scaled:.3g}"

    return show


def short(value: float) -> str:
    """A number with four significant digits and no trailing zeros: 7, 0.5, 235.7."""
    return f"{value:,.4g}"


def hours(value: float) -> str:
    """Hours with two decimals; below one hour, with three significant digits."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def percent(decimals: int, sign: str = "") -> Callable[[float], str]:
    """Shows a fraction in percent: with a sign a difference, without one a share, with small values as in `number`."""
    if sign:
        return lambda value: f"{100 * value:{sign}.{decimals}f} %"
    return lambda value: f"{number(decimals, 0.01)(value)} %"


def render(results: ResultTable, form: Form) -> None:
    """Print a table to stdout; in the forms other than "table", notes go to stderr and there is no legend."""
    _PRINTERS[form](results)
    if form != "table":
        for note in results.notes:
            print(note, file=sys.stderr)


def _print_csv(results: ResultTable) -> None:
    writer = csv.DictWriter(sys.stdout, [column.key for column in results.columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows(results.bare_rows())


def _print_markdown(results: ResultTable) -> None:
    columns = results.shown_columns()
    lines = [[column.title for column in columns]]
    lines.append(["---" if column.is_text else "---:" for column in columns])
    lines += [[column.cell(row).replace("|", "\\|") for column in columns] for row in results.rows]
    for line in lines:
        print(f"| {' | '.join(line)} |")


def _print_table(results: ResultTable) -> None:
    console = Console(highlight=False)
    # Piped output has no terminal whose width would matter.
    room = console.width if console.is_terminal else _UNLIMITED
    table, hidden = fitted(console, results, room)
    # A number cut short would be another number: if there still is no room, lines are longer than the terminal.
    if results.rows:
        needed = _width(console, table)
        width = max(needed.minimum, min(needed.maximum, room if console.is_terminal else _PIPED))
        Console(highlight=False, width=width).print(table)
        print()
    notes = [*results.legend, *results.notes] if results.rows else list(results.notes)
    if hidden:
        left_out = ", ".join(column.title for column in hidden)
        notes.append(f"Columns left out, as the terminal is too narrow: {left_out}.")
    for note in notes:
        Console(highlight=False, width=room).print(Text(note))


def fitted(console: Console, results: ResultTable, room: int) -> tuple[Table, list[Column]]:
    """The table for people, and the columns that were left out to make it at most `room` characters wide."""
    columns = results.shown_columns()
    hidden: list[Column] = []
    table = _table(results, columns)
    while _width(console, table).maximum > room and any(column.spare for column in columns):
        hidden.append(max(columns, key=lambda column: column.spare))
        columns.remove(hidden[-1])
        table = _table(results, columns)
    return table, hidden


def _width(console: Console, table: Table) -> Measurement:
    """The width in characters that the table needs with its columns folded, and to be shown in full."""
    return Measurement.get(console, console.options.update(width=_UNLIMITED), table)


def _table(results: ResultTable, columns: Sequence[Column]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.is_text else "right"
        overflow: Literal["fold", "ellipsis"] = "fold" if column.folds else "ellipsis"
        texts = [*column.heading.splitlines(), *map(column.cell, results.rows)]
        least = None if column.folds else max(map(cell_len, texts), default=0)
        table.add_column(column.heading, justify=justify, overflow=overflow, no_wrap=not column.folds, min_width=least)
    ends = {sum(results.groups[: index + 1]) for index in range(len(results.groups))}
    for index, row in enumerate(results.rows, start=1):
        cells = (Text(column.cell(row), column.style(row[column.key]) if column.style else "") for column in columns)
        table.add_row(*cells, end_section=index in ends)
    return table


_PRINTERS: dict[Form, Callable[[ResultTable], None]] = {
    "table": _print_table,
    "json": lambda results: print(json.dumps(results.bare_rows(), indent=1, allow_nan=False)),
    "csv": _print_csv,
    "markdown": _print_markdown,
}
