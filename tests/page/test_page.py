"""The shell of every page: plain text stays text, nothing outside is referred to, equal parts are equal bytes."""

import re
import subprocess
import sys

import pytest
from browser import Read, open_page

from vitscale.ground.page import SERIES, Drawing, Facts, Folded, Section, Table, Text, draw, page_text
from vitscale.ground.table import Column, ResultTable, number

pytest.importorskip("matplotlib")

ODD = "<script>alert('1')</script> & \"--></style>"


def figure(name: str = "first", width: int = 600) -> Drawing:
    def put(figure):
        left, right = figure.subplots(1, 2)
        for index, colour in enumerate(SERIES):
            left.plot([1, 10, 100], [index, index + 1, index], "o-", color=colour, label=ODD)
        left.set_title(ODD)
        left.legend()
        left.set_xscale("log")
        right.imshow([[1, 2], [3, 4]])

    return draw(name, ODD, put, width=width, caption=ODD)


def page() -> str:
    columns = [Column("name", ODD, is_text=True), Column("top1", "top-1\n(%)", number(2, 0.01))]
    view = ResultTable(columns, [{"name": ODD, "top1": 0.987654}, {"name": "b", "top1": None}], [ODD], [ODD], (1,))
    table = Table(view, ODD, frozenset({1}))
    parts = (Text(ODD), Text(ODD, "warning"), Facts([(ODD, f"{ODD}\nsecond line")]), table)
    second = figure("second", 300)
    return page_text(ODD, ODD, [Section(ODD, parts), Section("two", [figure(), second, Folded(ODD, [table])])])


@pytest.fixture(scope="module")
def text() -> str:
    return page()


def test_text_is_text_and_nothing_is_outside(text):
    read = Read(text)
    assert "script" not in read.tags and read.outside == [] and "http" not in text.replace("http-equiv", "")
    assert sum(ODD in word for word in read.words) >= 12  # title, headings, table, alternative texts, figures
    assert read.numbers == [("98.77", "0.987654")] * 2


@pytest.mark.parametrize("planted", ["<script>no()</script>", '<img src="http://example.com/x.png">'])
def test_what_a_page_forbids_itself_is_seen(text, tmp_path, planted):
    file = tmp_path / "page.html"
    file.write_text(text.replace("</main>", f"{planted}</main>"))
    assert open_page(file, tmp_path / "profile").console


def test_ids_are_unique_and_all_that_is_named_is_there(text):
    ids = re.findall(r'\bid="([^"]*)"', text)
    named = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', text)
    assert len(set(ids)) == len(ids) and {one or other for one, other in named} <= set(ids)


def test_colours_follow_the_page(text):
    figures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert not any(colour in figures for colour in SERIES) and "#000000" not in figures
    assert all(f"var(--series-{index})" in figures for index in range(1, len(SERIES) + 1))
    assert "currentColor" in figures


def test_another_process_with_other_settings_makes_the_same_bytes(text, tmp_path):
    (tmp_path / "matplotlibrc").write_text("axes.facecolor: black\nfont.size: 30\n")
    lines = "import sys; from test_page import page; sys.stdout.write(page())"
    paths = [path for path in sys.path if path]
    environment = {"PYTHONPATH": ":".join(paths), "MPLCONFIGDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", lines], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == text


def test_a_number_that_is_none_is_no_page():
    view = ResultTable([Column("a", "a")], [{"a": float("nan")}])
    with pytest.raises(ValueError):
        page_text("", "", [Section("", [Table(view)])])
