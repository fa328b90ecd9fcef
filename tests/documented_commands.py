"""The commands that pages and recipes show: in blocks of code and in backticks, taken apart as a shell would."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "cluster/*.md", "benchmarks/*.md")
    for path in REPOSITORY.glob(pattern)
    if path.name not in ("LOG.md", "CHANGELOG.md")  # what was, not what is
)
RECIPES = sorted(REPOSITORY.glob("recipes/**/*.yaml"))  # their comments show commands, too
PROGRAMS = ("vitscale", "vitscale-convert", "vitscale-flops")
_PRETRAIN = ("vitscale/pretrain.py", "vitscale.pretrain")
# Other programs of pages, by the first word of a line in a block of code.
_OTHERS = (
    r"(\$ |srun |nohup )*(\.|make|pip|python\S*|\.venv/\S+|jq|tensorboard|kill|kubectl|docker|git|s?batch|scancel)"
)
_LAUNCHERS = ("deepspeed", "torchrun", "python", "accelerate", "srun", "mpirun", "nohup", "pdsh")
_SEPARATORS = {"|", "&&", "||", ";", "&", "do", "done", ">", "2>&1", "then"}
# What pages write in the place of a number or of one of several words.
_STANDS_FOR = {
    **{"N": "1", "R": "0", "P": "1", "STEP": "1", "MINUTES": "1", "GB/s": "1", "0..3": "0", "%n": "0"},
    "KEY=VALUE": "seed=1",
}


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        page: path in the repository.
        program: `pretrain` is vitscale/pretrain.py under any launcher; `sh` a line of other programs, its only word.
        is_whole: whether it is in a block of code, to be typed as it is; a mention in a sentence may be incomplete.
        launcher: the words before the program, such as those of `torchrun`.
    """

    page: str
    line: int
    program: str
    words: tuple[str, ...]
    is_whole: bool
    launcher: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.typed}"

    @property
    def typed(self) -> str:
        """The command without its place."""
        if self.program == "sh":
            return self.words[0]
        return shlex.join([*self.launcher, self.program, *self.words])


def documented_commands() -> list[Command]:
    """All commands of all pages, each once a page, in the page's order; those in blocks of code before mentions."""
    found = [
        Command(str(page.relative_to(REPOSITORY)), line, program, words, is_whole, launcher)
        for page in (*PAGES, *RECIPES)
        for line, text, is_whole in texts(page)
        for launcher, program, words in _commands(text)
    ]
    once: dict[tuple[str, str], Command] = {}
    for each in sorted(found, key=lambda each: (each.page, not each.is_whole, each.line)):
        once.setdefault((each.page, each.typed), each)
    return list(once.values())


def other_commands(page: Path) -> list[Command]:
    """The lines of a page's blocks of code that run programs which are not ours."""
    return [
        Command(str(page.relative_to(REPOSITORY)), line, "sh", (re.sub(r"^\$ | +#.*", "", text),), is_whole)
        for line, text, is_whole in texts(page)
        if is_whole and re.match(rf"{_OTHERS} ", text) and not list(_commands(text))
    ]


def texts(page: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is a line of code) of blocks of code, continued lines joined, and of backticks."""
    indent = "#   " if page.suffix == ".yaml" else "    "
    fenced, joined = False, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith(indent):
            joined += line.removeprefix(indent).strip()
            if joined.endswith("\\"):
                joined = joined[:-1]
                continue
            yield number, joined, True
            joined = ""
        else:
            yield from ((number, text, False) for text in re.findall(r"`([^`]+)`", line) if " " in text)


def _commands(text: str) -> Iterator[tuple[tuple[str, ...], str, tuple[str, ...]]]:
    text = re.sub(r";( |$)", r" ; ", text)
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # prose with an apostrophe
        return
    simple: list[list[str]] = [[]]
    for word in words:
        if word in _SEPARATORS:
            simple.append([])
        else:
            simple[-1].append(word)
    for each in simple:
        yield from _of_simple(each)


def _of_simple(words: list[str]) -> Iterator[tuple[tuple[str, ...], str, tuple[str, ...]]]:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables before a command
        words = words[1:]
    if not words or words[0] not in (*PROGRAMS, *_LAUNCHERS):
        return
    for at, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in PROGRAMS and (at == 0 or words[0] in _LAUNCHERS):
            yield tuple(words[:at]), name, _given(words[at + 1 :])
            return
        if word.endswith(_PRETRAIN):
            yield tuple(words[:at]), "pretrain", _given(words[at + 1 :])
            return


def _given(words: list[str]) -> tuple[str, ...]:
    """Words as somebody would type them: optional ones are given, of several the first, numbers for their letters."""
    given = []
    for word in words:
        word = word.strip("[]") if word[:1] == "[" or (word[-1:] == "]" and "[" not in word) else word
        word = word.split("|")[0] if re.fullmatch(r"[\w./-]+(\|[\w./-]+)+", word) else word
        word = word.removesuffix("...").removesuffix(",")
        word = re.sub(r"\$\w+", "1", word)  # of a loop's variable
        if word:
            given.append(_STANDS_FOR.get(word, word))
    return tuple(given)
