"""Messages as people read them: one page for each family of errors, in tests/message_pages/.

Other tests ask for error classes, exit codes, keys and figures; the wording is compared here alone. To write a page
anew, delete it and run its tests in one process with `VITSCALE_WRITE_MESSAGES=1`; then read the difference as a user
would.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGES = Path(__file__).parent / "message_pages"
# Words of pydantic, which differ between its versions; a message with them belongs on no page.
OF_PYDANTIC = re.compile(r"\b(Input|String|Tuple) should |Field required")


def assert_messages(family: str, messages: Mapping[str, str], places: Mapping[str | Path, str] = {}) -> None:
    """Compare messages with what their page says of the same causes.

    Args:
        family: the page's stem.
        messages: by what causes them, in the order of the page.
        places: paths and addresses of this test run, each with the word that stands for it on the page.
    """

    def on_page(text: str) -> str:
        for place, word in sorted(places.items(), key=lambda item: -len(str(item[0]))):
            text = text.replace(str(place), word)
        return re.sub(r"\b[0-9a-f]{64}\b", "SHA256", text)

    said = {on_page(cause): on_page(message) for cause, message in messages.items()}
    page = PAGES / f"{family}.txt"
    if os.environ.get("VITSCALE_WRITE_MESSAGES"):
        page.parent.mkdir(exist_ok=True)
        paragraphs = (_paragraphs(page) if page.exists() else {}) | said
        page.write_text("\n".join(f"# {cause}\n{message}\n" for cause, message in paragraphs.items()), encoding="utf-8")
    paragraphs = _paragraphs(page)
    assert said == {cause: paragraphs.get(cause) for cause in said}


@contextmanager
def refusal(
    kind: type[Exception] | tuple[type[Exception], ...], family: str, cause: str, places: Mapping[str | Path, str] = {}
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of a class, whose message is that of its page; arguments as `assert_messages` takes them.

    The words of another library within it differ between versions: the page has REASON in their place.
    """
    with pytest.raises(kind) as caught:
        yield caught
    reason = caught.value.__cause__
    foreign = {text: "REASON" for text in (repr(reason), str(reason)) if reason is not None and text}
    assert_messages(family, {cause: str(caught.value)}, {**places, **foreign})


def causes(family: str) -> list[str]:
    """Those of a page, for tests that have no other list of them."""
    return list(_paragraphs(PAGES / f"{family}.txt"))


def _paragraphs(page: Path) -> dict[str, str]:
    """The messages of a page by their causes."""
    parts = re.split(r"(?:\A|\n\n)# ", page.read_text(encoding="utf-8").removesuffix("\n"))[1:]
    return {cause: message for cause, _, message in (part.partition("\n") for part in parts)}
