"""Text from elsewhere, made fit for people, logs and reports: no secrets of URLs, nothing that controls a terminal.

All that a process prints passes through `SafeStream` or `vitscale.ground.table.Console`, and every error's message is
`shown`. What is stored (keys, sources, reports) passes through `without_secrets` where it is written.
"""

import re
import sys
from typing import Any

# Names of secret parameters: by their last part, or (sig, key) as words of their own, so that `monkey` is none.
_NAME = (
    r"(?:x-(?:amz|goog|oss|ms|cos|obs|tos|bce)-[\w.-]+|[\w.%\[\]-]*(?:signature|token|secret|passw(?:or)?d|passphrase|"
    r"pwd|credentials?|(?:api|access|secret|auth|private|shared|app|account|session)[_-]?key|key-?id|access-?id|jwt|hmac|"
    r"session-?id)\]?|(?:[\w.%-]*[_.-])?(?:sig|sign|key|pass|auth|authorization|policy|key-pair-id|session|sas|ticket|code))"
)
# As it is, in HTML (but not the end of its other letters), in a URL of a URL, and in JSON that is careful.
_AND = r"(?:&(?:amp;|#38;)*|(?<!&#3[49])(?<!&[lg]t);|%26|\\+u0026)"
_PARAMETER = _NAME + r"""(?:=|%3d|\\+u003d)(?:[^\s"'<>\\&#]|\\(?!u0026)[^"'nrt])*(?<![:.,;)\]}])"""
_FIRST = re.compile(rf"(?:(?<=[?#])|(?<=%3f))(?:{_PARAMETER}{_AND})+", re.IGNORECASE)
_OTHER = re.compile(rf"(?:[?#]|%3f|{_AND}){_PARAMETER}", re.IGNORECASE)
# The user before a URL's host. A password that nobody has percent-encoded may hold / ? # and @: then what follows the
# first colon is no port, and the host is what follows an @ without another one in its part of the path.
_USER = re.compile(
    r"""([a-z][a-z0-9+.-]{1,20}:(?:\\*/)+)(?:([^\s/?#"<>]{0,4096})@|[^\s/?#@:"<>\[]{0,256}:"""
    r"""(?!:[a-z]|\d*(?:[/?#\s"'<>]|$))(?:(?!:\\*/)[^\s"<>]){0,4096}?@(?=[^\s/@"<>]*(?:[/\s"'<>]|$)))""",
    re.IGNORECASE,
)
_WEB = re.compile(r".*(?:https?|webdavs?|davs?):[\\/]+", re.IGNORECASE)
_ENCODED_USER = re.compile(r"""(%3a(?:%2f){2})(?:(?!%2f)[^\s/?#&"'<>]){0,4096}?%40""", re.IGNORECASE)
# A block of a recipe, in JSON or as Python shows it.
_KEYED = re.compile(
    r"""(["'](?:[\w.-]*[_.-])?(?:signature|token|secret|passw(?:or)?d|passphrase|credentials?|jwt|"""
    r"""(?:api|access|secret|auth|private|account)[_-]?key)\\*["']\s*:\s*)(\\*["'])(?:(?!\2)(?:\\.|[^\\]))+\2""",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"""(authorization["']?\s*[:=,]\s*["']?)(?:[a-z]+\s+)?(?:[^\s"'\\,;)}\]]|\\[^\s"'])+""", re.IGNORECASE
)


def without_secrets(text: str) -> str:
    """Text, or one URL, without what grants access: passwords before hosts, signatures and tokens in queries or blocks.

    A user's name stays, as `abfs://container@account` needs it, except on the web, where it may be a token.
    """
    for _ in range(3 if ":" in text and "/" in text else 0):  # a password may look like a host with a password
        text = _USER.sub(_without_user, text)
    if "%" in text:
        text = _ENCODED_USER.sub(r"\1", text)
    text = _KEYED.sub(r"\1\2...\2", _HEADER.sub(r"\1...", text))
    return _OTHER.sub("", _FIRST.sub("", text)) if re.search("=|%3|u003d", text, re.IGNORECASE) else text


def _without_user(found: re.Match[str]) -> str:
    scheme, user = found.groups(default=":")
    is_name = not re.search(":|%3a", user, re.IGNORECASE) or scheme == "github://"  # github://org:repository@branch
    return found[0] if is_name and not _WEB.match(scheme) else scheme


def printable(text: str) -> str:
    """Text in one line, its unprintable characters escaped, so that nothing in it controls a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def csv_cell(text: str) -> str:
    """Text for a table's file: as people may see it, with an apostrophe before what a spreadsheet would compute."""
    text = printable(without_secrets(text))
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")) else text


def shown(text: str) -> str:
    """Text as people may see it: without secrets, all unprintable characters but line ends escaped."""
    return "\n".join(map(printable, without_secrets(text).split("\n")))


def indented(message: str) -> str:
    """An error's message with all lines but the first indented: a line end in a name begins no line of its own."""
    return message.replace("\n", "\n  ")


class SafeStream:
    """Standard output or error; what is printed there is `shown`. rich writes its own codes to `rich_proxied_file`."""

    def __init__(self, stream: Any) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write text as people may see it."""
        self.rich_proxied_file.write(shown(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def protect_output() -> None:
    """Make all that Python prints to standard output and standard error safe, traces of bugs included."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is not None:
            setattr(sys, name, SafeStream(getattr(sys, name)))
