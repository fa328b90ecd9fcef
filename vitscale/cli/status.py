"""`vitscale status`: how runs are doing, once or again and again."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text
from typer import Argument, Exit, Option

from vitscale.about.status import NoRunYetError, RunReader, RunStatus
from vitscale.about.status.liveness import duration
from vitscale.about.status.recent import SlowestRank
from vitscale.about.status.run import Anomalies, Best, Evaluation, Restarts, Saved
from vitscale.cli.command_line import reader_is_gone
from vitscale.ground.errors import EXIT_INTERRUPTED, VitscaleError
from vitscale.ground.safe_text import indented, printable
from vitscale.ground.table import Column, Console, ResultTable, Row, fitted, hanging, hours, number, percent, short
from vitscale.ground.wording import counted, decimals

_EVERY_S = 2.0
_SHOWN_METRICS = 6
_UNLIMITED = 2**16  # characters in a line
_QUIET = ("done", "stopped early", "running")  # states that need no attention
_STYLES = {**dict.fromkeys(_QUIET, "green"), "failed": "red", "not running": "red"}

Outcome = RunStatus | VitscaleError


def status(
    runs: Annotated[list[str], Argument(metavar="RUN...", help="Directories of runs.")],
    watch: Annotated[
        bool,
        Option(
            "--watch",
            help="Look again every 2 s, from before a run begins until all are done. On a terminal the figures stay in "
            "place; elsewhere a line (with --json an object) is printed when a run has got on.",
        ),
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object a line for each run.")] = False,
) -> None:
    """Say how runs are doing: step, loss, speed, time left.

    Also exaFLOPs and device-hours so far, evaluations, checkpoints, restarts, and whether they are alive.
    """
    readers = {run: RunReader(run) for run in runs}
    if watch:
        _watch(readers, as_json)
    else:
        _show(readers, as_json)


def _show(readers: Mapping[str, RunReader], as_json: bool) -> None:
    """Print how runs are doing. Raises Exit with the code of the first one that has no answer."""
    outcomes = _read(readers)
    if as_json:
        for status in _known(outcomes):
            print(_json(status))
    elif known := _known(outcomes):
        console = _console()
        console.print(_picture(console, known), soft_wrap=True)
    for error in _errors(outcomes):
        _complain(error)
    _end(outcomes)


def _watch(readers: Mapping[str, RunReader], as_json: bool) -> None:
    """Show how runs are doing until each is done or has no answer any more; one that has not begun is waited for.

    Raises Exit with the code of the first of the latter, or with 130 when a person has seen enough.
    """
    console = _console()
    can_redraw = console.is_terminal and not console.is_dumb_terminal
    live = Live(console=console, auto_refresh=False) if can_redraw and not as_json else None
    said: dict[str, object] = {}
    begun: set[str] = set()
    try:
        with live or nullcontext():
            while True:
                outcomes = _read(readers)
                begun |= {run for run, outcome in outcomes.items() if not isinstance(outcome, NoRunYetError)}
                if live is not None:
                    live.update(_picture(console, _known(outcomes), _errors(outcomes)), refresh=True)
                else:
                    _say_news(outcomes, said, _json if as_json else _line)
                is_over = begun.issuperset(outcomes) and all(status.is_done for status in _known(outcomes))
                if is_over or reader_is_gone():
                    break
                time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        raise Exit(EXIT_INTERRUPTED) from None
    _end(outcomes)


def _say_news(outcomes: Mapping[str, Outcome], said: dict[str, object], show: Callable[[RunStatus], str]) -> None:
    """Print a run's status only when the run has progressed, ended or failed since it was `said` last."""
    for run, outcome in outcomes.items():
        if isinstance(outcome, VitscaleError):
            new: object = str(outcome)
        else:
            new = (outcome.state, outcome.step, outcome.evaluation, outcome.checkpoints.step, outcome.restarts)
        if said.get(run) == new:
            continue
        said[run] = new
        if isinstance(outcome, NoRunYetError):
            print(f"waiting: {outcome}", file=sys.stderr)
        elif isinstance(outcome, VitscaleError):
            _complain(outcome)
        else:
            print(show(outcome), flush=True)


def _read(readers: Mapping[str, RunReader]) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for run, reader in readers.items():
        try:
            outcomes[run] = reader.read()
        except VitscaleError as error:
            outcomes[run] = error
    return outcomes


def _known(outcomes: Mapping[str, Outcome]) -> list[RunStatus]:
    return [outcome for outcome in outcomes.values() if isinstance(outcome, RunStatus)]


def _errors(outcomes: Mapping[str, Outcome]) -> list[VitscaleError]:
    return [outcome for outcome in outcomes.values() if isinstance(outcome, VitscaleError)]


def _complain(error: VitscaleError) -> None:
    print(f"error: {indented(str(error))}", file=sys.stderr)


def _end(outcomes: Mapping[str, Outcome]) -> None:
    if errors := _errors(outcomes):
        raise Exit(errors[0].exit_code)


def _console() -> Console:
    console = Console(highlight=False)
    # Piped output has no terminal whose width would matter.
    return console if console.is_terminal else Console(highlight=False, width=_UNLIMITED)


def _json(status: RunStatus) -> str:
    return json.dumps(asdict(status), allow_nan=False)


def _picture(console: Console, known: Sequence[RunStatus], errors: Sequence[VitscaleError] = ()) -> RenderableType:
    """The status as a block of lines for one run, or a table for several."""
    table = ResultTable(_COLUMNS, [_row(status) for status in known])
    shown = [fitted(console, table, console.width)[0], *_remarks(known)] if len(known) > 1 else map(_block, known)
    return Group(*shown, *(Text(f"error: {printable(str(error))}") for error in errors))


def _block(status: RunStatus) -> RenderableType:
    facts = _facts(status)
    width = max(map(len, facts))
    lines = [Text(printable(status.run), style="bold")]
    for name, value in facts.items():
        style = _style(status) if name == "state" else ""
        lines.append(Text(f"  {name:<{width}}  ").append(hanging(printable(value), width + 4), style=style))
    return Group(*lines, *(Text(f"  note: {printable(note)}") for note in status.notes))


def _style(status: RunStatus) -> str:
    return _STYLES.get(status.state, "yellow")


_COLUMNS = (
    Column("run", "run", printable, is_text=True, folds=True),
    Column("state", "state", lambda status: status.state, is_text=True, style=_style),
    Column("step", "step", number(0)),
    Column("total_steps", "of", number(0), spare=3),
    Column("loss", "loss", "{:.4f}".format),
    Column("trend", "trend", spare=5),
    Column("top1", "top-1", percent(1)),
    Column("precision", "precision", spare=2),
    Column("images_per_s", "images/s", number(1), spare=4),
    Column("mfu", "MFU", percent(1), spare=6),
    Column("left_s", "left", duration),
    Column("exaflops", "exaFLOPs", number(3), spare=7),
)


def _row(status: RunStatus) -> Row:
    trend = None if status.trend is None else status.trend.direction
    top1 = None if status.evaluation is None else status.evaluation.values.get("validation/top1")
    return {**vars(status), "state": status, "trend": trend, "top1": top1}


def _line(status: RunStatus) -> str:
    row = _row(status)
    cells = "  ".join(f"{column.title} {cell}" for column in _COLUMNS[2:] if (cell := column.cell(row)))
    return f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}  {printable(status.run)}  {status.state}  {cells}".rstrip()


def _remarks(known: Sequence[RunStatus]) -> list[Text]:
    """Remarks below a table: what it has no room for but people may have to know."""
    remarks = []
    for status in known:
        said = [] if status.state in _QUIET else [f"{status.state}: {status.why}"]
        if status.slowest_rank is not None and status.slowest_rank.is_straggler:
            said.append(_slowest_rank(status.slowest_rank))
        remarks += [Text(printable(f"{status.run}: {remark}")) for remark in (*said, *status.notes)]
    return remarks


def _facts(status: RunStatus) -> dict[str, str]:
    speed = [
        _shown(status.images_per_s, number(1), " images/s"),
        _shown(status.step_time_s, short, " s a step"),
        _shown(status.mfu, percent(1), " MFU"),
        _devices(status),
    ]
    cost = [_shown(status.exaflops, number(3), " exaFLOPs"), _shown(status.device_hours, hours, " device-hours")]
    facts = {
        "state": f"{status.state} ({status.why})" if status.why else status.state,
        "step": _step(status),
        "loss": _loss(status),
        "speed": _joined(speed),
        "data wait": _shown(status.data_wait, percent(1), " of the time"),
        "memory": _shown(status.peak_memory_bytes, _size, " at most on a rank"),
        "so far": _joined(cost),
        "evaluation": _shown(status.evaluation, _evaluation),
        "best": _shown(status.best, lambda best: _best(best, status.selects)),
        "checkpoints": _checkpoints(status.checkpoints),
        "verified": status.verified or "",
        "restarts": _shown(status.restarts, _restarts),
        "anomalies": _shown(status.anomalies, _anomalies),
        "slowest rank": _shown(status.slowest_rank, _slowest_rank),
    }
    return {name: value for name, value in facts.items() if value}


def _step(status: RunStatus) -> str:
    if status.step is None:
        return f"none yet, of {status.total_steps:,}" if status.total_steps is not None else ""
    if not status.total_steps:
        return f"{status.step:,}, of a number that nothing tells yet"
    left = f", {duration(status.left_s)} left" if status.left_s is not None else ""
    return f"{status.step:,} of {status.total_steps:,} ({100 * status.step / status.total_steps:.1f} %{left})"


def _loss(status: RunStatus) -> str:
    if status.loss is None:
        return "not finite" if status.line_age_s is not None and status.step_time_s is not None else ""
    trend = status.trend
    if trend is None:
        return f"{status.loss:.4f}"
    by = "" if trend.direction == "level" else f" by {abs(trend.change):.3g}"
    return f"{status.loss:.4f}, {trend.direction}{by} over the last {trend.steps:,} steps"


def _evaluation(evaluation: Evaluation) -> str:
    shown = [f"{name} {_shown(value, decimals) or 'not finite'}" for name, value in evaluation.values.items()]
    more = f"  and {len(shown) - _SHOWN_METRICS} more (--json)" if len(shown) > _SHOWN_METRICS else ""
    return f"step {evaluation.step:,}: {'  '.join(shown[:_SHOWN_METRICS])}{more}"


def _best(best: Best, selects: bool) -> str:
    lost = " (no checkpoint of it)" if selects else " (not kept; set selection)"
    return f"step {best.step:,}: {best.metric} {best.value:.4f}{lost if best.is_kept is False else ''}"


def _checkpoints(saved: Saved) -> str:
    if saved.count is None:
        return f"at {saved.where}, which is not asked"
    if saved.step is None or saved.age_s is None:
        return f"none in {saved.where}"
    size = _shown(saved.bytes, _size, ", ")
    return f"step {saved.step:,} ({size}{duration(saved.age_s)} ago), {saved.count:,} in {saved.where}"


def _devices(status: RunStatus) -> str:
    if status.world_size is None:
        return ""
    others = [f"{world_size:,}" for world_size in status.world_sizes if world_size != status.world_size]
    return counted(status.world_size, "device") + (f" ({', '.join(others)} for other steps)" if others else "")


def _restarts(restarts: Restarts) -> str:
    text = f"{restarts.count:,} in {counted(restarts.launches, 'launch')}"
    for event in restarts.last[-1:]:
        when = f"{datetime.fromtimestamp(event.time, UTC):%Y-%m-%d %H:%M:%S} UTC"
        text += f"; the last {when} on {event.host}: {event.cause}"
    return text


def _anomalies(anomalies: Anomalies) -> str:
    limit = f" of at most {anomalies.limit:,}" if anomalies.limit is not None else ""
    text = f"{anomalies.left_out:,}{limit} left out, {counted(anomalies.reports, 'report')}"
    if anomalies.last is not None:
        text += ", that of the highest step: {step}, {kind}, {policy}".format(**anomalies.last)
    return text


def _slowest_rank(slow: SlowestRank) -> str:
    times = slow.seconds / slow.median_seconds if slow.median_seconds else 0.0
    straggler = f"STRAGGLER, {times:.2f} x the median; " if slow.is_straggler else ""
    return (
        f"{slow.rank}: {straggler}{slow.seconds:.3g} s of own work a step, median {slow.median_seconds:.3g} s; the "
        f"slowest in {slow.lines} of the last {slow.of_lines} lines"
    )


def _shown(value: Any, show: Callable[[Any], str], unit: str = "") -> str:
    return "" if value is None else show(value) + unit


def _size(size: float) -> str:
    """A size in bytes as text in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{short(size)} {unit}"
        size /= 1000
    return f"{short(size)} TB"


def _joined(parts: Sequence[str]) -> str:
    return ", ".join(part for part in parts if part)
