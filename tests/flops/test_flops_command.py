"""`vitscale-flops` as people type it: what it prints, and how mistakes end."""

import csv
import io
import json
import re

import pytest
from commands import Ended, command

from vitscale.cli.flops import app
from vitscale.flops.published import table_2
from vitscale.ground.table import Column, ResultTable, render

KEYS = "recipe model epochs tokens params gmacs accounting_gmacs images exaflops published_exaflops"
KEYS += " published_first_exaflops deviation"
OUTSIDE = {"ViT-B/32", "R50+ViT-L/16"}
NINES = "9" * 400
OWN = ["--hardware", "h200", "--devices", 8]


@pytest.fixture(autouse=True)
def no_place_for_datasets(monkeypatch):
    monkeypatch.delenv("VITSCALE_DATA_ROOT", raising=False)


def flops(*arguments: object) -> Ended:
    return command(*arguments, app=app)


def listed(*arguments: object) -> list[dict]:
    result = flops(*arguments, "--format", "json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def grid() -> dict[str, dict]:
    return {row["recipe"]: row for row in listed()}


def test_the_grid_beside_table_6(grid):
    assert all(" ".join(row) == KEYS for row in grid.values())
    compared = {name: row["deviation"] for name, row in grid.items() if row["published_exaflops"] is not None}
    assert list(grid)[: len(compared)] == list(compared)
    assert len({(grid[name]["model"], grid[name]["epochs"]) for name in compared}) == 18
    assert {grid[name]["model"] for name, deviation in compared.items() if abs(deviation) >= 0.015} == OUTSIDE


def test_the_legend_explains_the_rows_that_deviate():
    assert all(word in flops("b32_jft").stdout for word in ("Beyond 1.5 %", "ViT-B/32", "R50+ViT-L/16"))
    assert "Beyond" not in flops("b16_jft").stdout


def test_a_row_in_full(grid):
    """Parameters as the authors' code has them; MACs and exaFLOPs by hand."""
    macs = 256 * 588 * 1280 + 32 * 257 * (4 * 1280**2 + 2 * 1280 * 5120)
    macs += 32 * 2 * 257**2 * 1280 + 1280**2 + 1280 * 18_291
    exaflops = 6 * macs * 14 * 303e6 / 1e18
    assert grid["h14_jft"] == {
        **{"recipe": "h14_jft", "model": "ViT-H/14", "epochs": 14, "tokens": 257, "params": 655_835_251},
        **{"gmacs": macs / 1e9, "accounting_gmacs": macs / 1e9, "images": 4_242_000_000},
        **{"exaflops": pytest.approx(exaflops, rel=1e-12), "published_exaflops": 4262},
        **{"published_first_exaflops": 12826, "deviation": pytest.approx(exaflops / 4262 - 1, rel=1e-9)},
    }


def test_other_data_sets_and_lengths(grid):
    assert grid["b16_i21k"]["images"] == 90 * 14_094_722
    assert grid["l16_i1k"]["images"] == 300 * 1_281_167
    assert grid["b32_jft9m"]["images"] == 517_818 * 4096
    assert grid["b32_jft9m"]["epochs"] == pytest.approx(517_818 * 4096 / 9e6)
    assert grid["demo"]["exaflops"] is None and grid["demo"]["params"] is None and grid["demo"]["tokens"] == 17
    assert grid["r50x1_jft"]["tokens"] is None and grid["r50x1_jft"]["accounting_gmacs"] < grid["r50x1_jft"]["gmacs"]


def test_only_the_paper_s_own_run_has_a_published_figure(grid):
    assert grid["b16_jft"]["published_exaflops"] == 224
    for name in ("b16_nopos_jft", "b16_i21k", "r50x1_sgd_jft", "l16_jft9m"):
        assert grid[name]["published_exaflops"] is None
    for setting in ("model.pool=mean", "model.position.kind=2d", "model.depth=11", "data.image_size=256"):
        assert listed("b16_jft", "--set", setting)[0]["published_exaflops"] is None
    # Table 6 has ViT-H/14 for 14 epochs alone, and ViT-L/16 for 7 and 14.
    for setting in ("model.name=ViT-H/14", "schedule.duration.epochs=1", "optimizer={name: sgd, lr: 0.1}"):
        assert listed("l16_jft", "--set", setting)[0]["published_exaflops"] is None
    # By what it is, not by its name.
    assert grid["l16_jft"]["published_exaflops"] == 783
    assert listed("l16_jft", "--set", "schedule.duration.epochs=14")[0]["published_exaflops"] == 1567
    hybrid = ["--set", "model.name=R50x1+ViT-B/16"]
    assert listed("b16_jft", *hybrid)[0]["published_exaflops"] == 274
    assert listed("b16_jft", "--samples", 1000)[0]["published_exaflops"] is None


def test_fine_tuning_at_a_higher_resolution():
    settings = ["data.image_size=384", "model.head=linear", "model.num_classes=1000", "schedule.duration.steps=20000"]
    settings += ["batch.global=512", "schedule.warmup.steps=500"]
    (row,) = listed("b16_jft", *(part for setting in settings for part in ("--set", setting)))
    # timm lists 55.48 GMACs for vit_base_patch16_384, norms included.
    assert row["tokens"] == 577 and row["images"] == 20_000 * 512 and row["gmacs"] == pytest.approx(55.48, rel=2e-3)


def test_a_run_of_no_steps_is_said_to_be_one():
    ten_epochs = ("--set", "schedule.duration={epochs: 10}", "--set", "batch.global=128")
    result = flops("demo", "--samples", 100, "--set", "model.num_classes=3", *ten_epochs)
    assert all(part in result.stdout for part in ("0 steps", "10 epochs", "100 samples", "128"))


def test_a_dataset_that_is_missing():
    one = flops("b16_jft", "--set", "data.root=/nowhere")
    assert one.returncode == 2 and "/nowhere/jft300m/train" in one.stderr
    assert "--samples N stands in" in one.stderr and "num_classes" not in one.stderr
    both = flops("b16_jft", "b16_i1k", "--set", "data.root=/nowhere")
    assert both.returncode == 0 and "b16_jft, b16_i1k" in both.stdout


def test_the_breakdown_is_the_whole():
    rows = listed("r50_l32_jft", "--breakdown", "--set", "parallelism.activation_checkpointing=1")
    parts = {row["part"]: row for row in rows}
    total, again, hardware = parts.pop("model FLOPs"), parts.pop("recomputed"), parts.pop("hardware FLOPs")
    assert list(parts)[:6] == ["root", "stage1", "stage2", "stage3", "stage4", "patch_embedding"]
    assert {"qkv", "scores", "out", "mlp", "pre_logits", "head"} < set(parts)
    for key in ("params", "gmacs", "accounting_gmacs", "exaflops", "share"):
        assert sum(row[key] for row in parts.values()) == pytest.approx(total[key], rel=1e-12)
    assert total["share"] == 1
    # One of the three passes over the units and all of the blocks but the last product of each.
    blocks = sum(parts[name]["exaflops"] for name in ("stage1", "stage2", "stage3", "stage4", "qkv", "scores", "out"))
    assert again["exaflops"] == pytest.approx((blocks + parts["mlp"]["exaflops"] / 2) / 3, rel=1e-12)
    assert hardware["exaflops"] == pytest.approx(total["exaflops"] + again["exaflops"])
    printed = flops("b16_jft", "--set", "parallelism.activation_checkpointing=1").stdout
    assert "recomputes the activations of every block" in printed


def test_hours_energy_and_cost():
    (row,) = listed("l16_jft", *("--hardware", "H200", "--devices", 64, "--mfu", 0.45, "--price", 3.5))
    hours = row["exaflops"] * 1e18 / (64 * 989.4e12 * 0.45) / 3600  # no convolutions: model FLOPs of both kinds agree
    assert row["hours"] == pytest.approx(hours) and row["device_hours"] == pytest.approx(64 * hours)
    assert row["energy_kwh"] == pytest.approx(64 * hours * 0.7) and row["cost"] == pytest.approx(64 * hours * 3.5)
    out = flops("l16_jft", "--hardware", "h200", "--devices", 64, "--mfu", 0.45).stdout
    assert "NVIDIA H200 datasheet" in out and "bf16" in out and "cost" not in out


def test_the_utilisation_that_is_told_of_the_paper_gives_its_core_days_back():
    told = dict(re.findall(r"([\d.]+) for (\S+?)[,)]", flops("--hardware", "h200").stderr))
    models = {"h14_jft": "ViT-H/14", "l16_jft_14ep": "ViT-L/16"}
    assert set(told.values()) == set(models.values())
    of_model = {model: mfu for mfu, model in told.items()}
    for recipe, model in models.items():
        (row,) = listed(recipe, "--hardware", "tpuv3", "--devices", 1, "--mfu", of_model[model])
        (paper,) = [one for one in table_2() if (one.model, one.pretraining) == (model, "jft300m")]
        assert row["hours"] / 24 == pytest.approx(paper.tpuv3_core_days, rel=0.015)


def test_what_a_budget_buys():
    rows = listed("--budget", 500)
    assert all(row["exaflops"] <= 500 for row in rows)
    assert rows[0]["recipe"] == "r50_l32_jft" and rows[0]["imagenet"] == 85.68
    assert [row["imagenet"] or 0 for row in rows] == sorted((row["imagenet"] or 0 for row in rows), reverse=True)
    by_name = {row["recipe"]: row for row in rows}
    assert by_name["r50x1_sgd_jft"]["table"] == 7 and by_name["r50x1_sgd_jft"]["average_5"] == pytest.approx(88.786)
    assert by_name["b16_i1k"]["table"] == 5 and by_name["b16_nopos_jft"]["imagenet_5shot"] == 0.61382
    for name in ("l16_i21k", "l16_i21k_90ep"):
        assert (by_name[name]["imagenet"], by_name[name]["result_of_epochs"]) == (85.15, "30 or 90")
    assert by_name["b16_i21k"]["result_of_epochs"] is None
    assert by_name["b16_jft"]["imagenet_5shot"] == by_name["b16_pos1d_jft"]["imagenet_5shot"] == 0.64206
    assert "Nothing fits in 1 exaFLOPs; the smallest is b16_jft" in flops("b16_jft", "--budget", 1).stdout
    assert listed("b16_jft", "--budget", 1) == []


def test_csv_and_markdown_and_a_table_of_the_same():
    (from_json,) = listed("r50x1_jft")
    (row,) = csv.DictReader(io.StringIO(flops("r50x1_jft", "--format", "csv").stdout))
    assert list(row) == list(from_json) and float(row["exaflops"]) == from_json["exaflops"] and row["tokens"] == ""
    lines = flops("r50x1_jft", "--format", "markdown").stdout.splitlines()
    assert len(lines) == 3 and len({line.count("|") for line in lines}) == 1 and "+1.4 %" in lines[2]
    table = flops("r50x1_jft", "shape_all_double_jft").stdout
    assert "+1.4 %" in table and "…" not in table and "Left out" not in table
    assert all(heading in table for heading in ("epochs", "tokens", "posted", "acct."))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["b16_jtf"], ["b16_jft"]),
        (["demo"], ["digits/train", "--samples N and --set model.num_classes=K stand in"]),
        (["demo", "--samples", 1438], ["Without the dataset, --set model.num_classes=K stands in"]),
        (["b16_jft", "--set", "model.depht=3"], ["depht", "'model.depth'"]),
        (["--samples", 5], ["--samples"]),
        (["--hardware", "h300", "--devices", 1, "--mfu", 0.4], ["'h300'", "h200: 989.4 TFLOP/s bf16", "tpuv3", "T4"]),
        (["--hardware", "h200"], ["--devices", "--mfu"]),
        (["--hardware", "h200", "--devices", 8, "--mfu", 45], ["--mfu 0.45"]),
        (["--hardware", "h200", "--devices", 0, "--mfu", 0.45], ["--devices"]),
        (["--hardware", "h200", "--devices", 8, "--mfu", 0.45, "--price", -1], ["--price"]),
        (["--devices", 8], ["--devices", "--hardware"]),
        (["--budget", 500, "--mfu", 0.3, "--price", 2], ["--mfu, --price", "--hardware"]),
        (["--breakdown", "--devices", 8], ["--devices", "--breakdown"]),
        (["--hardware", "h200", "--mfu", 0.4, "--devices", NINES], ["--devices"]),
        (["demo", "--samples", NINES], ["--samples"]),
        ([*OWN, "--mfu", 1e-320, "--format", "json"], ["--mfu"]),
        ([*OWN, "--mfu", 1e-300], ["--mfu"]),
        ([*OWN, "--mfu", 0.4, "--price", 1e308, "--format", "json"], ["--price"]),
        (["--budget", "nan"], ["--budget"]),
        (["--breakdown", "--budget", 5], ["--breakdown", "--budget"]),
        (["--format", "xml"], ["xml"]),
    ],
)
def test_mistakes_end_with_one_message(arguments, words):
    result = flops(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert all(word in result.stderr for word in words), result.stderr


def test_json_has_no_infinity():
    with pytest.raises(ValueError, match="JSON"):
        render(ResultTable([Column("a", "a")], [{"a": float("inf")}]), "json")


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_fold_words_and_cut_no_number(terminal, capsys, monkeypatch):
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "60")
    columns = [Column("words", "words", is_text=True, folds=True), Column("state", "state", is_text=True)]
    columns += [Column(f"n{index}", f"n{index}") for index in range(3)]
    numbers = {f"n{index}": f"{10**9 + index}" for index in range(3)}
    render(ResultTable(columns, [{"words": "word " * 40, "state": "slows a little", **numbers}]), "table")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= (60 if terminal else 120)
    assert any("slows a little" in line and all(number in line for number in numbers.values()) for line in lines)
