from vitscale.ground.wording import counted, decimals, listed, quoted, ranges


def test_numbers_and_nouns():
    assert [counted(n, "class") for n in (0, 1, 2, 1000)] == ["0 classes", "1 class", "2 classes", "1,000 classes"]
    assert [counted(n, "shard") for n in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]
    several = ["2 epochs", "2 batches", "2 branches", "2 patches"]
    assert [counted(2, noun) for noun in ("epoch", "batch", "branch", "patch")] == several


def test_ranges():
    assert ranges([]) == "" and ranges([0, 1, 2, 3, 7, 9, 1000]) == "0-3, 7, 9, 1,000"
    assert ranges(list(range(0, 40, 2))).endswith("18 ...")


def test_the_first_few_of_many():
    assert quoted([], 2) == "" and quoted(["a", "b"], 2) == "'a', 'b'"
    assert quoted(iter("abc"), 2) == "'a', 'b' ..."
    assert quoted(["a"], 2, total=1) == "'a'" and quoted(["a"], 2, total=3) == "'a' ..."


def test_a_list_says_how_many_more_there_are():
    assert listed(["a", "b"], 2) == "a, b" and listed(range(1203), 2) == "0, 1 and 1,201 more"


def test_a_small_metric_is_told_with_its_exponent():
    assert [decimals(value) for value in (0.0, 0.75, 12.5)] == ["0.0000", "0.7500", "12.5000"]
    assert [decimals(value) for value in (1e-5, 5e-4, -2e-5)] == ["1.00e-05", "5.00e-04", "-2.00e-05"]
    assert [decimals(float(value)) for value in ("nan", "inf")] == ["nan", "inf"]
