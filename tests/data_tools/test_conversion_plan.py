from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import refusal

from data_tools import listing
from data_tools.listing import ListingTask, Spool, order_images
from data_tools.plan import ConversionPlan, write_plan
from data_tools.request import Request, parse_splits
from data_tools.sources.source import Item
from data_tools.tasks import run_inline
from vitscale.ground.errors import DataError, RecipeError


class Listed:
    """A source that is what a test says: a list of items a part."""

    def __init__(self, *parts: list[Item], streams: bool = False, class_names: tuple[str, ...] | None = None):
        self._items, self.streams, self.class_names = parts, streams, class_names
        self.parts = tuple(f"part {i}" for i in range(len(parts)))

    def items(self, part: int, ignored: Counter[str]):
        ignored["hidden"] += 1
        yield from self._items[part]


def paths(*keys: str) -> list[Item]:
    return [Item(key, None, key.encode()) for key in keys]


def plan_of(
    folder, source, splits=(), shard_samples=10, limit=None, seed=0, known=None, unlabelled=False
) -> ConversionPlan:
    place = folder / "listing"
    place.mkdir(parents=True, exist_ok=True)
    tasks = [ListingTask(source, part, place, seed, "") for part in range(len(source.parts))]
    list(run_inline(tasks, lambda *_: None))
    images = order_images(source, place, seed, known, unlabelled=unlabelled)
    rules = parse_splits(list(splits))
    request = Request("", shuffle_seed=seed, shard_samples=shard_samples, splits=rules, limit=limit)
    return write_plan(request, images, images.batches, folder, [], allow_unlabelled=True)


def rows_of(plan: ConversionPlan, tasks: range | None = None) -> list[dict]:
    return [row for _, batch in plan.rows(range(plan.tasks) if tasks is None else tasks) for row in batch.to_pylist()]


KEYS = [f"class{i % 7}/{i}.jpg" for i in range(500)]


def expected_order(keys, seed):
    return sorted(keys, key=lambda key: (xxhash.xxh3_64_intdigest(key.encode(), seed), key))


@pytest.mark.parametrize(("bucket_rows", "most"), [(7, listing._MAX_BUCKETS), (1000, listing._MAX_BUCKETS), (1, 64)])
def test_order_is_by_hash_then_key(tmp_path, monkeypatch, bucket_rows, most):
    monkeypatch.setattr(listing, "_BUCKET_ROWS", bucket_rows)
    monkeypatch.setattr(listing, "_MAX_BUCKETS", most)
    source = Listed(paths(*KEYS[:200]), paths(), paths(*KEYS[200:]))
    plan = plan_of(tmp_path, source, seed=7, shard_samples=64)
    assert [len(shard) for _, shard in plan.rows(range(plan.tasks))] == [64] * 7 + [52] and plan.images == 500
    rows = rows_of(plan)
    assert [row["key"] for row in rows] == expected_order(KEYS, 7)
    assert [row["uid"] for row in rows] == list(range(500))
    assert plan.class_names == tuple(f"class{i}" for i in range(7))
    for row in rows:
        number = int(row["key"].split("/")[1].removesuffix(".jpg"))
        assert row["labels"] == [number % 7] and row["content"] == row["key"].encode()
        assert row["part"] == (0 if number < 200 else 2)
    assert [plan.images_of(task) for task in range(plan.tasks)] == [64] * 7 + [52]
    assert plan.ignored == {"hidden": 3}
    assert ConversionPlan.load(tmp_path) == plan


def test_the_digest_tells_plans_apart(tmp_path):
    digests = set()
    for i, (keys, seed, size) in enumerate(((KEYS, 0, 10), (KEYS, 1, 10), (KEYS[1:], 0, 10), (KEYS, 0, 11))):
        digests.add(plan_of(tmp_path / str(i), Listed(paths(*keys)), seed=seed, shard_samples=size).sha256)
    digests.add(plan_of(tmp_path / "labels", Listed(paths(*KEYS)), unlabelled=True).sha256)
    assert len(digests) == 5


def labelled(*rows: tuple[str, tuple[str, ...]]) -> Listed:
    return Listed([Item(key, labels, b"") for key, labels in rows])


def labels_by_key(plan: ConversionPlan) -> dict[str, list[int]]:
    return {row["key"]: row["labels"] for row in rows_of(plan)}


@pytest.mark.parametrize(
    ("rows", "known", "class_names", "labels"),
    [
        ([("a", ("cat",)), ("b", ("ape",))], None, ("ape", "cat"), {"a": [1], "b": [0]}),
        ([("a", ("3",)), ("b", ("10",))], None, tuple(map(str, range(11))), {"a": [3], "b": [10]}),
        ([("a", ("3",)), ("b", ("x",))], ("x", "3"), ("x", "3"), {"a": [1], "b": [0]}),
        ([("a", ("007",)), ("b", ("010",))], None, ("007", "010"), {"a": [0], "b": [1]}),
        ([("a", ("2.0",)), ("b", ("-1",))], None, ("0", "1", "2"), {"a": [2], "b": []}),
        ([("a", ("1",)), ("b", ("0",))], ("no", "yes"), ("no", "yes"), {"a": [1], "b": [0]}),
        ([("a", ("1",)), ("b", ("2",))], ("2", "1"), ("2", "1"), {"a": [1], "b": [0]}),
        ([("a", ("cat", "ape")), ("b", ())], None, ("ape", "cat"), {"a": [1, 0], "b": []}),
        ([("a", ()), ("b", ())], None, (), {"a": [], "b": []}),
        ([("a", ("x", "x", "y", "x")), ("b", ())], None, ("x", "y"), {"a": [0, 1], "b": []}),
    ],
)
def test_labels_of_records(tmp_path, rows, known, class_names, labels):
    plan = plan_of(tmp_path, labelled(*rows), known=known)
    assert (plan.class_names, labels_by_key(plan)) == (class_names, labels)
    assert plan.several_labels == any(len(of_image) > 1 for of_image in labels.values())


def test_class_names_that_the_source_states(tmp_path):
    source = labelled(("a", ("cat",)), ("b", ("ape",)))
    source.class_names = ("dog", "cat", "ape")
    assert plan_of(tmp_path, source).class_names == ("dog", "cat", "ape")
    with pytest.raises(DataError, match=r"\b1 of 2\b.*--classes.*'cat'"):
        plan_of(tmp_path, source, known=("ape", "dog"))
    source.class_names = ("dog",)
    with pytest.raises(DataError, match="'ape', 'cat'"):
        plan_of(tmp_path, source)
    source.class_names = ("cat", "ape", "a" * 1001)
    with pytest.raises(DataError):
        plan_of(tmp_path, source)


@pytest.mark.parametrize(
    "parts",
    [
        [[]],
        [paths("1.jpg", "2.jpg", "cat/3.jpg")],
        [paths("train/1.jpg"), paths("train/cat/3.jpg")],
        [paths("a/1.jpg"), paths("a/1.jpg", "b/1.jpg")],
        [[Item("x", ("a",), b""), Item("x", ("b",), b"")]],
        [[Item("x", ("99999999999",), b"")]],
        [[Item("x", ("a" * 1001,), b"")]],
        [[Item("x", ("shop?code=1",), b""), Item("y", ("shop?code=2",), b"")]],
        [[Item("x", ('authorization=a"b',), b"")]],
        [paths("a&key=1/1.jpg", "a&key=2/1.jpg")],
        [[Item("x", ("1" * 400,), b""), Item("y", ("2",), b"")]],
        [[Item("x", ("3",), b""), Item("y", ("nan",), b"")]],
        [[Item("x", ("3",), b""), Item("y", ("007",), b"")]],
        [[Item("x", ("\ud800",), b"")]],
        [paths("train/cat/1.jpg", "val/cat/2.jpg")],
        [paths("Train/1.jpg", "Train/2.jpg")],
    ],
)
def test_sources_that_cannot_be_planned(tmp_path, parts):
    with refusal(DataError, "plan", str(parts)[:160]):
        plan_of(tmp_path, Listed(*parts))


def test_one_class_by_its_name(tmp_path):
    source = Listed(paths("cat/1.jpg", "cat/sub/2.jpg"))
    assert labels_by_key(plan_of(tmp_path, source, known=("dog", "cat"))) == {"cat/1.jpg": [1], "cat/sub/2.jpg": [1]}


def test_a_later_member_of_an_archive_replaces_an_earlier_one(tmp_path):
    twice = [Item("a/1.jpg", None, b"old"), Item("b/2.jpg", None, b""), Item("a/1.jpg", None, b"new")]
    plan = plan_of(tmp_path, Listed(twice))
    assert {row["key"]: row["content"] for row in rows_of(plan)} == {"a/1.jpg": b"new", "b/2.jpg": b""}
    assert plan.ignored == {"hidden": 1, "replaced later in the archive": 1}


def test_unlabelled_images_lie_anywhere(tmp_path):
    for prefix in ("", "data/all/"):
        names = (f"{prefix}{name}" for name in ("1.jpg", "x/2.jpg", "x/y/3.jpg"))
        plan = plan_of(tmp_path, Listed(paths(*names)), unlabelled=True)
        assert plan.class_names == () and labels_by_key(plan) == {"1.jpg": [], "x/2.jpg": [], "x/y/3.jpg": []}


def test_limit_takes_the_first(tmp_path):
    plan = plan_of(tmp_path / "25", Listed(paths(*KEYS)), limit=25)
    assert [row["key"] for row in rows_of(plan)] == expected_order(KEYS, 0)[:25]
    assert plan.tasks == 3
    shared = plan_of(tmp_path / "200", Listed(paths(*KEYS)), ["val=20%", "train=rest"], limit=200)
    assert shared.images == 200 and 20 < shared.splits[0].images < 60


def test_splits(tmp_path):
    (tmp_path / "keys.txt").write_text("\n".join(KEYS[5:9]))
    splits = (f"test=@{tmp_path}/keys.txt", "val=20", "odd=class3/*", "some=10%", "more=10%", "train=rest")
    plan = plan_of(tmp_path, Listed(paths(*KEYS)), splits)
    found, uids, task = {}, {}, 0
    for split in plan.splits:
        rows = rows_of(plan, range(task, task + split.shards))
        task += split.shards
        found[split.name], uids[split.name] = [row["key"] for row in rows], [row["uid"] for row in rows]
        assert split.images == len(rows)
    left = expected_order(KEYS, 0)
    assert found["test"] == [key for key in left if key in KEYS[5:9]]
    left = [key for key in left if key not in found["test"]]
    assert found["val"] == left[:20]
    left = left[20:]
    assert found["odd"] == [key for key in left if key.startswith("class3/")]
    left = [key for key in left if key not in found["odd"]]
    # Shares go by a hash of their own, so that they are spread over the shuffled order.
    place = {key: xxhash.xxh3_64_intdigest(key.encode(), 1 << 63) / 2**64 for key in left}
    assert found["some"] == [key for key in left if place[key] < 0.1] and len(found["some"]) > 20
    assert found["more"] == [key for key in left if 0.1 <= place[key] < 0.2] and len(found["more"]) > 20
    assert found["train"] == [key for key in left if place[key] >= 0.2]
    assert all(uids[name] == list(range(len(uids[name]))) for name in uids)
    places = [plan.place(task) for task in range(plan.tasks)]
    assert [(split.name, shard) for split, shard in places[:4]] == [("test", 0), ("val", 0), ("val", 1), ("odd", 0)]


def test_images_in_no_split_are_counted(tmp_path):
    plan = plan_of(tmp_path, Listed(paths(*KEYS)), ["a=class1/*"])
    assert plan.ignored["in none of the splits"] == 500 - plan.images
    (tmp_path / "keys.txt").write_text(f"\ufeff{KEYS[0]}\r\n\r\n{KEYS[1]}\r\n")
    assert plan_of(tmp_path, Listed(paths(*KEYS)), [f"a=@{tmp_path}/keys.txt"]).images == 2
    (tmp_path / "keys.txt").write_text(f"{KEYS[0]}\ntrain/{KEYS[1]}\n")
    for split in ("b=no/*", "b=501", f"b=@{tmp_path}/keys.txt"):
        with refusal(DataError, "plan", split, {tmp_path: "FOLDER"}):
            plan_of(tmp_path, Listed(paths(*KEYS)), [split])


def test_splits_that_mean_nothing():
    alone = ("val", "=2%", "../x=2%", "val=", "val=0%", "val=101%", "a b=1", "val=@/nowhere.txt", "val=0")
    for text in (*alone, f"val=1{'0' * 18}", "manifest.json=1"):
        with refusal(RecipeError, "plan", text):
            parse_splits([text])
    together = {"val, val": ("val=1", "val=rest"), "val=rest": ("val=rest", "train=1"), "100%": ("val=60%", "b=50%")}
    for named, splits in together.items():
        with pytest.raises(RecipeError, match=named):
            parse_splits(list(splits))


def test_a_spool_gives_the_bytes_back(tmp_path, monkeypatch):
    monkeypatch.setattr("data_tools.listing._RUN_BYTES", 2000)  # several runs
    rng = np.random.default_rng(0)
    bytes_of = {key: rng.bytes(int(rng.integers(1, 200))) for key in KEYS[:100]}
    items = [Item(key, ("x",), content) for key, content in bytes_of.items()]
    plan = plan_of(tmp_path, Listed(items[:40], items[40:], streams=True))
    rows = rows_of(plan)
    assert [row["key"] for row in rows] == expected_order(bytes_of, 0)
    spool = Spool(tmp_path / "listing")
    assert all(spool.read(row["part"], row["content"]) == bytes_of[row["key"]] for row in rows)
    (tmp_path / "listing" / "part-00000.bin").write_bytes(b"")
    with pytest.raises(DataError, match=str(tmp_path / "listing")):
        for row in rows:
            spool.read(row["part"], row["content"])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, unique=True), st.data())
def test_any_keys(tmp_path_factory, keys, data):
    """Whatever the keys are, they come back once each, with their labels."""
    labels = {key: tuple(data.draw(st.sets(st.sampled_from("abc")))) for key in keys}
    plan = plan_of(tmp_path_factory.mktemp("any"), labelled(*labels.items()), shard_samples=3)
    names = {key: {plan.class_names[label] for label in found} for key, found in labels_by_key(plan).items()}
    assert names == {key: set(found) for key, found in labels.items()}


def test_plan_is_small_in_memory(tmp_path):
    """Each task is read by itself."""
    plan = plan_of(tmp_path, Listed(paths(*KEYS)), shard_samples=100)
    before = pa.total_allocated_bytes()
    rows = plan.rows(range(plan.tasks))
    sizes = [pa.total_allocated_bytes() - before for _ in rows]
    assert len(sizes) == 5 and max(sizes) <= 2 * sizes[0] + 4096
