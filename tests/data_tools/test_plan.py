import xxhash

from data_tools.plan import shard_ranges, shuffled

KEYS = sorted(f"class{i % 7}/{i}.jpg" for i in range(500))


def test_order_is_by_hash_then_key():
    for seed in (0, 7):
        expected = sorted(range(len(KEYS)), key=lambda i: (xxhash.xxh3_64_intdigest(KEYS[i].encode(), seed), KEYS[i]))
        assert shuffled(KEYS, seed).tolist() == expected
    assert shuffled(KEYS, 0).tolist() != shuffled(KEYS, 1).tolist()


def test_more_images_leave_the_order_of_the_others():
    fewer = [key for key in KEYS if "class3" not in key]
    order = [KEYS[i] for i in shuffled(KEYS, 5)]
    assert [key for key in order if key in set(fewer)] == [fewer[i] for i in shuffled(fewer, 5)]


def test_shards_cover_every_position_once():
    assert shard_ranges(10, 4) == [range(0, 4), range(4, 8), range(8, 10)]
    assert shard_ranges(8, 4) == [range(0, 4), range(4, 8)]
    assert shard_ranges(3, 100) == [range(0, 3)]
