"""Messages as people read them: one page for each family of errors, in tests/message_pages/.

Other tests ask for error classes, exit codes, keys and figures; the wording is compared here alone. To write a page
anew, run its test with `VITSCALE_WRITE_MESSAGES=1`; then read the difference as a user would.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

PAGES = Path(__file__).parent / "message_pages"
# Words of pydantic, which differ between its versions; a message with them belongs on no page.
OF_PYDANTIC = re.compile(r"\b(Input|String|Tuple) should |Field required")


def assert_messages(family: str, messages: Mapping[str, str], places: Mapping[str | Path, str] = {}) -> None:
    """Compare messages with their page.

    Args:
        family: the page's stem.
        messages: by what causes them, in the order of the page.
        places: paths and addresses of this test run, each with the word that stands for it on the page.
    """
    parts = []
    for cause, message in messages.items():
        for place, word in sorted(places.items(), key=lambda item: -len(str(item[0]))):
            message = message.replace(str(place), word)
        parts.append(f"# {cause}\n{message}\n")
    said, page = "\n".join(parts), PAGES / f"{family}.txt"
    if os.environ.get("VITSCALE_WRITE_MESSAGES"):
        page.parent.mkdir(exist_ok=True)
        page.write_text(said, encoding="utf-8")
    assert said == page.read_text(encoding="utf-8")
