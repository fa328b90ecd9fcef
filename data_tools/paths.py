"""Finds which directory of a path names the class, for sources whose folders are the labels.

The rule: leading directories that all paths share are stripped, as long as every path keeps one; the next directory is
the class. The rest of the path is the image's key, so a tar with `train/cat/1.jpg` and a folder with `cat/1.jpg` give
equal datasets.
"""

from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from vitscale.ground.errors import DataError

_EXAMPLES = 5
# Common names of splits, and which of them mean the same.
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "trainval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "minival", "dev", "eval", "evaluation", "holdout"), "val"),
    **dict.fromkeys(("test", "testing", "test_dev"), "test"),
}


def refuse_splits(class_names: Iterable[str], src: str) -> None:
    """Raise DataError if the classes found are names of splits: a test set would end up in a training set."""
    names = sorted(class_names)
    splits = [name for name in names if name.lower() in SPLIT_NAMES]
    if splits and (splits == names or len(splits) > 1):
        shown = ", ".join(map(repr, names[:20])) + (" ..." if len(names) > 20 else "")
        raise DataError(
            f"{src}: by its folders the classes are {shown}, which are names of splits. Convert one split at a "
            "time, each into a dataset of its own; --classes if these really are classes, --labels FILE or "
            "--unlabelled if folders say nothing"
        )


class PathStatistics:
    """A small summary of any number of paths, enough to apply the rule.

    Attributes:
        first, last: the smallest and largest path, split at `/`; their common prefix is that of all paths.
        counts: number of paths, by number of parts.
        examples: the few smallest paths, by number of parts.
    """

    def __init__(self) -> None:
        self.first: list[str] | None = None
        self.last: list[str] | None = None
        self.counts: dict[int, int] = {}
        self.examples: dict[int, list[str]] = {}

    def add(self, path: str) -> None:
        """Add a path."""
        parts = path.split("/")
        depth = len(parts)
        if self.first is None or parts < self.first:
            self.first = parts
        if self.last is None or parts > self.last:
            self.last = parts
        self.counts[depth] = self.counts.get(depth, 0) + 1
        examples = self.examples.setdefault(depth, [])
        if len(examples) < _EXAMPLES or path < examples[-1]:
            self.examples[depth] = sorted([*examples, path])[:_EXAMPLES]

    def to_json(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "last": self.last,
            "depths": [[depth, self.counts[depth], self.examples[depth]] for depth in sorted(self.counts)],
        }

    @classmethod
    def merged(cls, parts: Iterable[dict[str, Any]]) -> "PathStatistics":
        """Statistics of all paths, from what `to_json` gave for each part."""
        whole = cls()
        for part in parts:
            for end in (part["first"], part["last"]):
                if end is not None:
                    whole.first = end if whole.first is None else min(whole.first, end)
                    whole.last = end if whole.last is None else max(whole.last, end)
            for depth, count, examples in part["depths"]:
                whole.counts[depth] = whole.counts.get(depth, 0) + count
                whole.examples[depth] = sorted([*whole.examples.get(depth, []), *examples])[:_EXAMPLES]
        return whole

    def common_depth(self) -> int:
        """Number of leading directories that all paths share."""
        assert self.first is not None and self.last is not None
        pairs = zip(self.first[:-1], self.last[:-1], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def class_depth(self, known_classes: frozenset[str]) -> int:
        """Number of leading directories before the class. Raises DataError if images lie outside of class folders."""
        assert self.first is not None
        total = sum(self.counts.values())
        if 1 in self.counts:
            raise DataError(
                f"{self.counts[1]:,} of {total:,} images lie outside of class folders: {self._shown(1)}. Expected "
                "CLASS/FILE: put every image into a folder named like its class, or give a list of labels with "
                "--labels, or say --unlabelled"
            )
        common = self.common_depth()
        depth = min(common, min(self.counts) - 2)
        # `train/cat/1.jpg` and a stray `train/2.jpg`: read literally, the rule would put everything into class `train`.
        if common > depth and self.first[depth] not in known_classes:
            beside = self.counts.get(depth + 2, 0)
            if beside < total:
                raise DataError(
                    f"{beside:,} of {total:,} images lie beside the folders in '{'/'.join(self.first[: depth + 1])}', "
                    f"not in them: {self._shown(depth + 2)}. Move them into class folders; or, if all images are of "
                    f"the one class '{self.first[depth]}', say so with --classes"
                )
        return depth

    def _shown(self, depth: int) -> str:
        shown = ", ".join(map(repr, self.examples[depth]))
        return shown + (" ..." if self.counts[depth] > len(self.examples[depth]) else "")
