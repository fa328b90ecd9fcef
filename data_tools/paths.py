"""Tells which part of a path names the class, where folders do.

The rule: directories that all paths have in common are stripped from the front, as long as every path keeps one; the
next directory is the class. What is left of the path is the image's key, so that a tar with `train/cat/1.jpg` and a
folder with `cat/1.jpg` give equal datasets.
"""

from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from vitscale.errors import DataError

_EXAMPLES = 5
# What splits are called, and which of them mean the same.
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "trainval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "minival", "dev", "eval", "evaluation", "holdout"), "val"),
    **dict.fromkeys(("test", "testing", "test_dev"), "test"),
}


def refuse_splits(class_names: Iterable[str], src: str) -> None:
    """Raise DataError where the classes found are what splits are called: a test set would go into a training set."""
    names = sorted(class_names)
    splits = [name for name in names if name.lower() in SPLIT_NAMES]
    if splits and (splits == names or len(splits) > 1):
        shown = ", ".join(map(repr, names[:20])) + (" ..." if len(names) > 20 else "")
        raise DataError(
            f"{src}: by its folders the classes are {shown}, which is what splits are called. Convert one split at a "
            "time, each into a dataset of its own; --classes if these are classes indeed, --labels FILE or "
            "--unlabelled if folders say nothing"
        )


class PathStatistics:
    """What the rule needs to know of any number of paths, in little space.

    Attributes:
        first, last: the extreme paths, in parts: the common prefix of all is theirs.
        counts: how many paths have how many parts.
        examples: the smallest few paths of each number of parts.
    """

    def __init__(self) -> None:
        self.first: list[str] | None = None
        self.last: list[str] | None = None
        self.counts: dict[int, int] = {}
        self.examples: dict[int, list[str]] = {}

    def add(self, path: str) -> None:
        """Take one more path into account."""
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
        """The statistics of all paths, from those of the parts as `to_json` gives them."""
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
        """How many leading directories all paths have in common."""
        assert self.first is not None and self.last is not None
        pairs = zip(self.first[:-1], self.last[:-1], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def class_depth(self, known_classes: frozenset[str]) -> int:
        """How many leading directories are not the class. Raises DataError where images lie outside of classes."""
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
        # `train/cat/1.jpg` and a stray `train/2.jpg`: by the letter everything would be of the class `train`.
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
