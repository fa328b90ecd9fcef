"""The output of a conversion: the dataset's folder or URL, and the state of an unfinished conversion there.

    OUT/                         shards and tables; one folder per split, if there are splits
    OUT/dedup.parquet, dedup/    images left out as copies of test images, and a report on them
    OUT/manifest.json            written last, so it marks a complete dataset
    OUT/convert.log.jsonl        when, where, how fast
    OUT/.vitscale-convert/       until then: the request, the plan, a marker for every finished shard

An output at a URL is uploaded from a local folder (`work`), one shard at a time; a local output is written in place,
under temporary names.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from glob import has_magic
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from vitscale.data.shards import MANIFEST_NAME
from vitscale.data.shards.provenance import DECISIONS_NAME, REJECTS_NAME
from vitscale.ground import storage
from vitscale.ground.errors import RecipeError
from vitscale.ground.files.durable import durable_file, make_folder, remove_leftovers, write_text
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.wording import counted, quoted

LOG_NAME = "convert.log.jsonl"
STATE_NAME = ".vitscale-convert"
CONVERSION_NAME = "conversion.json"
REPORT_FOLDER = "dedup"
_FIXED_NAMES = "|".join(map(re.escape, (REJECTS_NAME, DECISIONS_NAME, REPORT_FOLDER, MANIFEST_NAME)))
_OURS = re.compile(rf"shard-\d{{5,}}\.(beton|idx\.parquet)|{_FIXED_NAMES}")
_PART = re.compile(rf"\.({_OURS.pattern})\.[0-9a-f]{{8}}\.part")  # left by workers that were killed
_SHOWN = 5

SPLIT_NAME = "[A-Za-z0-9][A-Za-z0-9_-]*"
SplitName = Annotated[str, Field(pattern=f"^({SPLIT_NAME})?$")]
"""The name of a split, which is its folder's; empty if there are no splits."""

# A task's state files: its report, which marks it as done; the images that it could not store; its decisions (images
# left out, near misses), absent if there are none; and the findings of its comparison with test sets.
TaskFile = Literal["json", "rejects.parquet", "dedup.parquet", "dedup.json"]


@contextmanager
def staged(targets: Sequence[str], work: Path | None = None) -> Iterator[list[Path]]:
    """Local paths to write files to, complete or not at all: the targets themselves, if they are paths.

    If they are URLs, what was written to a folder in `work` is uploaded if no error is raised.
    """
    if not any(map(storage.is_url, targets)):
        paths = [Path(target) for target in targets]
        for path in paths:
            make_folder(path.parent)
        yield paths
        return
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=work) as folder:
        paths = [Path(folder) / storage.base_name(target) for target in targets]
        yield paths
        for path, target in zip(paths, targets, strict=True):
            if path.exists():
                storage.put(path, target)


@dataclass(frozen=True)
class Output:
    """The folder or URL that a conversion writes to. Sent to every worker."""

    where: str
    work: Path  # local folder for files that only this machine needs: listing, plan, spool

    @classmethod
    def at(cls, where: str, work: Path | None) -> "Output":
        """The output at a path or URL. By default its work folder is inside it, or in the user's cache for a URL.

        If `work` is given, the work folder is a new folder in it; that folder is removed at the end with its content.

        Raises RecipeError for a URL that is a pattern or has no path.
        """
        where = storage.without_file_scheme(where)
        if not storage.is_url(where):
            where = str(Path(where).absolute())
            if work is None:
                return cls(where, Path(where) / STATE_NAME)
        elif has_magic(where):  # removing files at such a URL would treat it as a pattern
            raise RecipeError(f"OUT {where}: expected a URL without * ? [")
        elif not where.partition("://")[2].strip("/"):
            raise RecipeError(f"OUT {where}: expected a URL with a path, such as s3://bucket/dataset")
        where = where.rstrip("/") or where
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        digest = hashlib.sha256(without_secrets(where).encode()).hexdigest()[:16]
        return cls(where, (work or cache / "vitscale") / f"convert-{digest}")

    @property
    def is_remote(self) -> bool:
        return storage.is_url(self.where)

    def place(self, split: str = "", name: str = "") -> str:
        """Path or URL of a split's dataset, or of a file in it."""
        folder = storage.join(self.where, split) if split else self.where
        return storage.join(folder, name) if name else folder

    def state(self, name: str) -> str:
        """Path or URL of a state file."""
        return storage.join(storage.join(self.where, STATE_NAME), name)

    def of_task(self, task: int, kind: TaskFile) -> str:
        """Path or URL of one of a task's state files."""
        return self.state(f"done/{task:06d}.{kind}")

    def staged(self, *targets: str) -> AbstractContextManager[list[Path]]:
        """As `staged`, for files of the output."""
        if self.is_remote:
            self.work.mkdir(parents=True, exist_ok=True)
        return staged(targets, self.work)

    def write(self, target: str, text: str) -> None:
        """Write a file of the output, complete or not at all."""
        with self.staged(target) as (path,):
            write_text(path, text)

    def fill_folder(self, split: str, name: str, local: Path, files: list[str]) -> None:
        """Make a folder of a split's dataset hold copies of these files of a local folder, and nothing else."""
        folder = self.place(split, name)
        with self.staged(*(storage.join(folder, file) for file in files)) as paths:
            for path, file in zip(paths, files, strict=True):
                with (local / file).open("rb") as source, durable_file(path) as target:
                    shutil.copyfileobj(source, target)
        for other in set(storage.names_in(folder)).difference(files):  # left by an earlier attempt
            storage.remove(storage.join(folder, other))

    def read_conversion(self) -> bytes | None:
        """What `conversion.json` holds; None if there is none."""
        with suppress(FileNotFoundError):
            return storage.read_bytes(self.state(CONVERSION_NAME))
        return None

    @contextmanager
    def reading_state(self) -> Iterator[None]:
        """Within this context, state that is not as it was written raises RecipeError."""
        try:
            yield
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            what = f"its state, {self.state('')}, is damaged. Remove the output and start anew"
            raise RecipeError(f"OUT {self.where}: {what}") from None

    def refuse_foreign(self, splits: list[str]) -> None:
        """Raise RecipeError if the output holds anything that vitscale-convert did not put there."""
        if not self.is_remote and Path(self.where).exists() and not Path(self.where).is_dir():
            raise RecipeError(f"OUT {self.where}: is a file. Choose a new or empty folder")
        names = storage.names_in(self.where)
        begun = self.read_conversion() is not None  # marks our own unfinished work
        known = {STATE_NAME, LOG_NAME, *(splits if begun else ())}
        foreign = [
            name
            for name in names
            if (name not in known and not (begun and (_OURS.fullmatch(name) or _PART.fullmatch(name))))
            or (name in (STATE_NAME, REPORT_FOLDER, *splits) and os.path.islink(storage.join(self.where, name)))  # noqa: PTH114
        ]
        if foreign:
            raise RecipeError(
                f"OUT {self.where}: not empty ({counted(len(foreign), 'other file')}: {quoted(foreign, _SHOWN)}). "
                "Choose a new or empty folder"
            )

    def is_complete(self, splits: list[str]) -> bool:
        """Whether every dataset of the output has its manifest."""
        return all(storage.size_of(self.place(split, MANIFEST_NAME)) is not None for split in splits)

    def clear_state(self, splits: list[str]) -> None:
        """Remove the state of the unfinished conversion."""
        if not self.is_remote:
            for split in splits:
                remove_leftovers(Path(self.place(split)))
            shutil.rmtree(self.state(""), ignore_errors=True)
        else:
            storage.remove_folder(self.state(""))
        shutil.rmtree(self.work, ignore_errors=True)

    @property
    def log_path(self) -> Path:
        """The log on this machine; a remote output gets it at the end."""
        return (self.work if self.is_remote else Path(self.where)) / LOG_NAME

    def log(self, event: str, **what: Any) -> None:
        """Append to the log what must not be in the manifest: when, where, how fast. Raises OSError."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **what}
        with open(self.log_path, "a", opener=storage.regular) as file:
            file.write(json.dumps(line) + "\n")

    def logged_request(self) -> dict[str, Any] | None:
        """The last request logged in this output; None if there is none."""
        try:
            content = storage.read_bytes(self.place(name=LOG_NAME)).decode("utf-8")
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        for line in reversed(content.splitlines()):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):  # truncated by a kill, or mixed with the line of another machine
                continue
            if isinstance(event, dict) and "request" in event:
                return event["request"]
        return None
