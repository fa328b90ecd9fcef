"""index.json, the last file of a checkpoint: what the run was, and the size and sha256 of every other file.

A rank that resumes and a command that only looks read it with the same code and the same checks, so a checkpoint that
is damaged for one is damaged for the other. Below: which checkpoints a folder or URL has. No tensor is read here.

Version 2 added `anomalies` and `position`. Indices of version 1 are read as having skipped nothing.
Version 3 is version 2 with `state_shapes`; an index that does not need them is still written as version 2.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import pydantic

from vitscale.ground.errors import CheckpointError, turned
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.storage import is_url, join, names_in, read_bytes
from vitscale.ground.wording import describe_mistake
from vitscale.recipe import Recipe
from vitscale.runs.names import CHECKPOINTS, INDEX_FILE, step_folder
from vitscale.runs.reading import count

SCHEMA_VERSION = 3
MASTER = "master"
EMA = "ema"

_WITHOUT_STATE_SHAPES = 2
# Before a slash in the names of tensors, and in messages.
_Kind = Annotated[str, pydantic.Field(pattern=r"^[\w.-]{1,200}$")]
_Shape = list[Annotated[int, pydantic.Field(ge=0, lt=2**53)]]
_READABLE = (1, _WITHOUT_STATE_SHAPES, SCHEMA_VERSION)


def average_kind(name: str) -> str:
    """The kind of an average of the weights by its name in the recipe: `ema`, or `ema.NAME`."""
    return EMA if name == EMA else f"{EMA}.{name}"


def weight_kinds(recipe: Recipe) -> list[str]:
    """The kinds of a run's weights and averages."""
    return [MASTER, *(average_kind(average.name) for average in recipe.all_averages)]


def is_weights(kind: str) -> bool:
    """Whether a kind is that of the weights or of an average of them, and not of an optimizer's state."""
    return kind == MASTER or kind.partition(".")[0] == EMA


def _with_names(data: dict[str, Any]) -> dict[str, Any]:
    names = data.get("class_names")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("class_names: expected a list of names")
    return data


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: its name in the checkpoint's folder (`path`), size in bytes, and sha256 in hex."""

    path: str
    bytes: Annotated[int, pydantic.Field(ge=0, lt=2**53)]
    sha256: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]

    def __post_init__(self) -> None:
        # Files at a URL are copied to this machine under this name: it must not point outside the folder.
        if self.path in ("", ".", "..") or set("/\\\0") & set(self.path):
            raise ValueError(f"{self.path!r} is not the name of a file")


@dataclass(frozen=True)
class CheckpointIndex:
    """The content of index.json, without its own checksum."""

    step: int  # updates done
    world_size: Annotated[int, pydantic.Field(ge=1, lt=2**53)]  # the number of ranks that wrote the checkpoint
    shapes: dict[str, _Shape]  # by parameter
    kinds: list[_Kind]  # what is stored for every parameter, such as `master` or `exp_avg`
    optimizer_steps: int  # the number of updates that the optimizer's moments have seen
    recipe: dict[str, Any]  # the run's, resolved
    data: Annotated[dict[str, Any], pydantic.AfterValidator(_with_names)]  # what identifies the dataset and its order
    versions: dict[str, str]  # of the code and libraries that wrote the checkpoint
    selection: dict[str, int | float | None] = field(default_factory=dict)  # of the best checkpoint, and early stopping
    anomalies: dict[str, Any] = field(default_factory=dict)  # state of the anomaly policy: what was skipped
    position: int = -1  # batches of the order consumed: `step`, unless given, and more if some were skipped
    files: list[FileEntry] = field(default_factory=list)  # every other file of the checkpoint
    state_shapes: dict[str, dict[str, _Shape | None]] = field(default_factory=dict)
    """Kind -> parameter -> shape of state that does not have its parameter's shape; None where nothing is stored."""

    def __post_init__(self) -> None:
        if len(set(self.kinds)) < len(self.kinds):
            raise ValueError(f"kinds {self.kinds}: one is there twice")
        if any(map(is_weights, self.state_shapes)):
            raise ValueError("weights and their averages have the shapes of their parameters")
        if self.position == -1:
            object.__setattr__(self, "position", self.step)
        if self.position < self.step:
            raise ValueError(f"position {self.position} is before step {self.step}")

    @property
    def evaluated_kind(self) -> str:
        """The kind that evaluation and export use: the weights' moving average if the run keeps one, else `master`."""
        return EMA if EMA in self.kinds else MASTER

    def kind_of_average(self, name: str) -> str:
        """The kind of an average by its name. Raises `CheckpointError` if there is none of that name."""
        if (kind := average_kind(name)) in self.kinds:
            return kind
        known = ", ".join(each.removeprefix(f"{EMA}.") for each in self.kinds if is_weights(each) and each != MASTER)
        raise CheckpointError(
            f"step {self.step} has no average of the weights named {name!r}; it has {known or 'none'}"
        )

    def shape_of(self, kind: str, name: str) -> list[int] | None:
        """The shape of a parameter's stored state of a kind; None if nothing is stored."""
        return self.state_shapes.get(kind, {}).get(name, self.shapes[name])

    @property
    def num_samples(self) -> int | None:
        """The number of training samples; None if the checkpoint does not come from a run."""
        return count(self.data.get("num_samples"))

    @property
    def bytes(self) -> int:
        """The total size of all files."""
        return sum(file.bytes for file in self.files)


_INDEX = pydantic.TypeAdapter(CheckpointIndex)


def index_text(index: CheckpointIndex) -> str:
    """The content of index.json."""
    content = json.loads(without_secrets(json.dumps(asdict(index)))) | {"schema_version": SCHEMA_VERSION}
    if not index.state_shapes:  # so that an older vitscale can read it
        del content["state_shapes"]
        content["schema_version"] = _WITHOUT_STATE_SHAPES
    content["checksum"] = _checksum(content)
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def parse_index(text: bytes, where: str, step: int | None = None) -> CheckpointIndex:
    """Parse an index and check its version, checksum and structure, but none of its files. Raises `CheckpointError`.

    `where` is its path or URL, for messages, `step` the step that it should have, or None for any.
    """
    with turned(f"{where}: cannot be read", CheckpointError, ValueError, RecursionError):
        content = json.loads(text)
    version = content.pop("schema_version", None) if isinstance(content, dict) else None
    if version not in _READABLE:
        raise CheckpointError(
            f"{where}: schema_version is {version!r}; this vitscale reads {', '.join(map(str, _READABLE))}"
        )
    if content.pop("checksum", None) != _checksum(content | {"schema_version": version}):
        raise CheckpointError(f"{where}: its content is damaged or was edited (it does not match its own checksum)")
    try:
        index = _INDEX.validate_json(json.dumps(content), strict=True)
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{where}: {describe_mistake(error.errors()[0])}") from None
    if step is not None and index.step != step:
        raise CheckpointError(f"{where}: it is the index of step {index.step}, in the folder {step_folder(step)}")
    return index


def read_index(folder: Path, step: int | None = None) -> CheckpointIndex:
    """The index of the checkpoint in a folder. Raises as `parse_index`."""
    path = folder / INDEX_FILE
    try:
        text = read_bytes(path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {INDEX_FILE}, so this checkpoint was never finished") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_index(text, str(path), step)


def find_path(path: str, index: CheckpointIndex | None, run_dir: Path | None = None) -> Path:
    """Find what a local path in a run's recipe, such as `init.from`, refers to now; itself if nothing is found.

    A relative path is looked up in the folder that the run began in, as the index of one of its checkpoints tells, then
    in the current one. If `run_dir` is given, the path's last component is then looked up beside that directory: runs
    may have been moved together.
    """
    here = Path(os.path.expanduser(path))  # noqa: PTH111 (without an error where there is no home)
    began_in = None if index is None else index.data.get("working_directory")
    places = [Path(began_in, here)] if isinstance(began_in, str) else []
    places += [here] if run_dir is None else [here, run_dir.parent / here.name]
    return next((place for place in places if os.path.exists(place)), here)  # noqa: PTH110 (no error either)


def data_root(recipe: Recipe, index: CheckpointIndex) -> str | None:
    """The run's `data.root`: a URL, or a path that `find_path` has looked up; None if the recipe has none."""
    root = recipe.data.root
    return root if root is None or is_url(root) else str(find_path(root, index))


def _checksum(content: dict[str, Any]) -> str:
    """The sha256 of an index's own content: its digests of files prove nothing if the index can change unnoticed."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def steps_among(names: Iterable[str]) -> list[int]:
    """The steps of the checkpoint folders among `names`, in order."""
    numbers = (int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal())
    return sorted(step for step in numbers if step_folder(step) in names)


def steps_at(root: str) -> list[int]:
    """The steps of the checkpoints in a folder or below a URL, in order; not verified. Raises OSError, StorageError."""
    steps = steps_among(names_in(root))
    if is_url(root):  # a folder at a URL exists from its first file on; a local one is renamed once it is complete
        steps = [step for step in steps if INDEX_FILE in names_in(join(root, step_folder(step)))]
    return steps


def newest_checkpoint_step(run_dir: Path) -> int:
    """The step of the newest complete checkpoint in the run directory, whether or not it verifies; 0 for none."""
    with suppress(OSError):
        return max(_saved(run_dir / CHECKPOINTS), default=0)
    return 0


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in a folder."""

    steps: list[int]  # oldest first
    saved_at: float | None  # when the newest was written, in seconds since 1970; None if there is none
    newest: CheckpointIndex | None  # of those that can be read
    problems: list[str]  # what is wrong with that checkpoint and newer ones, one message each


def read_checkpoints(folder: Path) -> Checkpoints:
    """The checkpoints in a folder of this machine. Raises nothing: what cannot be read is listed as a problem."""
    written: dict[int, int] = {}
    problems: list[str] = []
    try:
        written = _saved(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{folder} cannot be read: {error.strerror}")
    steps = sorted(written)
    saved_at = written[steps[-1]] / 1e9 if steps else None
    for step in reversed(steps):
        index, wrong = _read(folder / step_folder(step), step, written[step])
        problems += wrong
        if index is not None:
            return Checkpoints(steps, saved_at, index, problems)
    return Checkpoints(steps, saved_at, None, problems)


def _saved(folder: Path) -> dict[int, int]:
    """Step -> when its index was written, in nanoseconds since 1970. Raises OSError."""
    found = {}
    for step in steps_among(os.listdir(folder)):  # noqa: PTH208 (names are enough)
        with suppress(OSError):  # being removed, or never finished
            found[step] = (folder / step_folder(step) / INDEX_FILE).stat().st_mtime_ns
    return found


@lru_cache(maxsize=64)
def _read(folder: Path, step: int, modified_ns: int) -> tuple[CheckpointIndex | None, tuple[str, ...]]:
    """The index of a checkpoint, or None, and the first thing that is wrong: with the index, or with a file's size.

    `modified_ns`, the index's time of writing, keys the cache.
    """
    try:
        index = read_index(folder, step)
    except CheckpointError as error:
        return None, (str(error),)
    for file in index.files:
        try:
            size = (folder / file.path).stat().st_size
        except OSError as error:
            return index, (f"{folder / file.path}: {error.strerror}",)
        if size != file.bytes:
            return index, (f"{folder / file.path}: {size:,} bytes, expected {file.bytes:,}",)
    return index, ()
