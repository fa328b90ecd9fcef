"""Pages as a browser and as a reader see them: headless Chromium, and the text and references in the HTML."""

import html.parser
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND"),
)


class Opened(NamedTuple):
    """What Chromium made of a page: the document after loading, and what its console says."""

    document: str
    console: list[str]


def open_page(page: Path, folder: Path) -> Opened:
    """Open a file. The test skips where there is no Chromium, and fails where CI runs.

    A page forbids itself every request and script by its content policy: each try is a line of the console.
    """
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        message = "no Chromium here: apt-get install chromium"
        (pytest.fail if "CI" in os.environ else pytest.skip)(message)
    command = [program, *_QUIET, f"--user-data-dir={folder}", "--enable-logging=stderr", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Opened(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])


class Read(html.parser.HTMLParser):
    """A page taken apart.

    Attributes:
        words: text that people read, piece by piece, alternative texts included.
        references: values of src, href and the like, and what `url()` names.
        numbers: (text, all digits) of each number in a table.
        rows: text of each table row's cells.
        tags: names of all elements.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.references: list[str] = re.findall(r"url\(([^)]*)\)", page)
        self.numbers: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self._digits: str | None = None
        self._in_cell = False
        self._hidden = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        known = {key: value or "" for key, value in attributes}
        self.references += [known[key] for key in ("src", "href", "srcset", "data", "action") if key in known]
        self.words += [known[key] for key in ("alt", "aria-label") if key in known]
        self._hidden += tag in ("style", "script")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._digits, self._in_cell = known.get("title"), True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("style", "script")
        if tag in ("td", "th"):
            self._digits, self._in_cell = None, False

    def handle_data(self, data: str) -> None:
        if self._hidden or not data.strip():
            return
        self.words.append(data.strip())
        if self._in_cell:
            self.rows[-1][-1] += data.strip()
        if self._digits is not None:
            self.numbers.append((data.strip(), self._digits))

    @property
    def outside(self) -> list[str]:
        """References that leave the page."""
        return [name for name in self.references if not name.startswith(("#", "data:"))]

    @property
    def holes(self) -> list[str]:
        """Words that stand where a number or a name should."""
        return [word for word in self.words if re.search(r"\b(nan|inf|None|undefined|null|NaN)\b", word)]
