import io

from rich.console import Console

from data_tools import report
from data_tools.report import ProgressDisplay, Totals, summary


def shown(terminal: bool, images: int | None = 1000) -> str:
    out = io.StringIO()
    with ProgressDisplay(Console(file=out, force_terminal=terminal, width=120), "converting", images) as view:
        view.update(250, 2)
        view.update(1000, 3)
    return out.getvalue()


def test_lines_where_there_is_no_terminal(monkeypatch):
    assert shown(terminal=False) == ""  # not every update is a line
    monkeypatch.setattr(report, "_LINE_SECONDS", 0)
    first, second = shown(terminal=False).splitlines()
    assert first.startswith("converting: 250 of 1,000 images, ") and first.endswith(" s left, rejected 2")
    assert second.startswith("converting: 1,000 of 1,000 images, ")
    assert shown(terminal=False, images=None).startswith("converting: 250 images, ")


def test_bar_on_a_terminal():
    assert "1000/1000" in shown(terminal=True) and "images/s" in shown(terminal=True)


def test_summary():
    out = io.StringIO()
    totals = Totals(
        samples=98, passed_through=90, transcoded=8, rejected=2, shards=1, bytes=12345, seconds=10.0, images_now=100
    )
    Console(file=out, width=80).print(summary(totals))
    for text in ("98", "90", "8", "2", "12,345", "images/s", "10"):
        assert text in out.getvalue()
