"""The report: what stands on the page is in results.json, the page opens, and bad input is told before any work."""

import json
import math
import shutil
import statistics
import sys
from pathlib import Path

import pytest
import yaml
from browser import Read, open_page
from commands import command
from report.made_runs import WritingEngine, part, write_data, write_run, write_study
from scipy.stats import norm

from vitscale.about.report import gather, page, write_report
from vitscale.flops.published import table_2, table_9
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.vtab import TASKS

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_data(root, "pets", against=["pets"])
    write_data(root, "flowers")
    write_data(root, "imagenet21k", against=["pets", "test"], splits=("full",))
    return root


@pytest.fixture(scope="module")
def pretrained(root, tmp_path_factory) -> Path:
    """A run that others begin with."""
    folder = tmp_path_factory.mktemp("before")
    write_run(folder / "i21k", [f"data.root={root}", "data.train=imagenet21k/full"])
    return folder / "i21k"


@pytest.fixture(scope="module")
def study(root, pretrained, tmp_path_factory) -> Path:
    """Fine-tuned and from scratch on two data sets; one entry has failed, one is in the middle."""
    transfer = part(root, ["pets", "flowers"])
    transfer["settings"] |= {"init.from": str(pretrained), "data.image_size": 32}
    engine = WritingEngine(failing=["scratch-flowers-lr0.3"], halves=["transfer-flowers-full-seed1"])
    return write_study(
        tmp_path_factory.mktemp("study"), {"transfer": transfer, "scratch": part(root, ["pets", "flowers"])}, engine
    )


def reported(*sources: Path) -> tuple[dict, str, Read]:
    """results.json, the page, and the page taken apart."""
    report = gather(sources)
    text = page(report)
    return json.loads(json.dumps(report.plain(), allow_nan=False)), text, Read(text)


@pytest.fixture(scope="module")
def made(study) -> tuple[dict, str, Read]:
    """The study, reported."""
    return reported(study)


def check_numbers(content: dict, read: Read) -> None:
    """Each number of the tables is one of results.json, and what is shown is that number, rounded, or in percent."""
    known: set[str] = set()
    json.loads(json.dumps(content), parse_int=known.add, parse_float=known.add)
    assert read.numbers
    for shown, digits in read.numbers:
        assert digits in known, shown
        value, exact = float(shown.replace(",", "").removesuffix("%").strip()), float(digits)
        assert any(value == pytest.approx(exact * scale, rel=6e-3, abs=6e-3) for scale in (1, 100))


def test_a_study_with_a_failed_and_an_unfinished_entry(made, tmp_path):
    content, text, read = made
    assert content["states"] == {"done": 12, "failed": 1, "not run": 2, "unfinished": 1}
    assert "script" not in read.tags and "b" not in read.tags and read.outside == [] and read.holes == []
    check_numbers(content, read)
    (tmp_path / "index.html").write_text(text)
    opened = open_page(tmp_path / "index.html", tmp_path / "profile")
    assert opened.console == [] and Read(opened.document).rows == read.rows


def test_equal_records_are_equal_bytes(study, made):
    assert reported(study)[:2] == made[:2]


def test_figures_are_those_of_the_runs_whatever_the_study_says(study, made, tmp_path):
    shutil.copytree(study, tmp_path / "study")
    path = tmp_path / "study" / "results.json"
    own = json.loads(path.read_text())
    for entry in own["entries"]:
        entry["metrics"] = dict.fromkeys(entry["metrics"], 0.99)
    path.write_text(json.dumps(own))
    content, _, _ = reported(tmp_path / "study")
    assert [result["mean"] for result in content["results"]] == [result["mean"] for result in made[0]["results"]]


def test_means_are_the_studys(study, made):
    own = json.loads((study / "results.json").read_text())
    content, _, _ = made
    (summary,) = [s for s in own["summaries"] if (s["part"], s["dataset"], s["split"]) == ("transfer", "pets", "test")]
    of = {(r["part"], r["task"], r["split"], r["metric"]): r for r in content["results"]}
    result, half = (of["transfer", task, "test", "validation/top1"] for task in ("pets", "flowers"))
    values = summary["metrics"]["validation/top1"]
    assert (result["mean"], result["std"], result["n"]) == (values["mean"], values["std"], 2)
    assert result["seeds"] == [0, 1] and result["runs"] == summary["entries"]
    assert (half["n"], half["n_planned"], half["std"]) == (1, 2, None)


def test_the_ends_of_intervals_are_where_the_score_test_rejects(made):
    found = [r for r in made[0]["results"] if r["interval"] is not None]
    assert found and {r["metric"] for r in found} <= {"validation/top1", "validation/top5"}
    for result in found:
        low, high = result["interval"]
        assert 0 <= low < result["mean"] < high <= 1
        for end in low, high:  # Wilson's are the shares of which the one found is 1.96 standard errors away
            error = math.sqrt(end * (1 - end) / result["samples"])
            assert abs(result["mean"] - end) / error == pytest.approx(norm.ppf(0.975), rel=1e-9)


def test_policies_are_apart(made):
    content, _, read = made
    sizes = {policy["name"]: (policy["image_size"], policy["positions"]) for policy in content["policies"]}
    assert sorted(sizes.values()) == [(16, "as trained"), (32, "resampled, bilinear with corners aligned")]
    for result in content["results"]:
        assert sizes[result["policy"]][0] == (32 if result["part"] == "transfer" else 16)
    captions = [word for word in read.words if word.startswith("Policy ") and "normalised by" in word]
    assert len(captions) == 2


def test_what_was_left_out_for_which_test_set(made):
    rows = {(r["test"], r["train"], r["role"]): r for r in made[0]["deduplication"]}
    pets = rows["pets/test", "pets/full", "training"]
    assert (pets["status"], pets["left_out_for_it"], pets["left_out_in_all"]) == ("recorded", 2, 3)
    assert rows["pets/test", "imagenet21k/full", "pre-training"]["status"] == "recorded"
    assert rows["flowers/test", "flowers/full", "training"]["status"] == "none recorded"
    assert rows["flowers/test", "flowers/full", "training"]["left_out_in_all"] is None
    none = rows["flowers/test", "imagenet21k/full", "pre-training"]  # which was compared with some set named "test"
    assert none["status"] == "none recorded"
    assert not any(test.endswith("/dev") for test, _, _ in rows)


def test_what_is_below_the_current_folder_is_named_without_it(root, study, pretrained, made, monkeypatch):
    assert all(one["where"] == f"{root}/{one['name']}/manifest.json" for one in made[0]["datasets"])
    monkeypatch.chdir(root.parent)
    content, text, _ = reported(study)
    assert all(one["where"] == f"{root.name}/{one['name']}/manifest.json" for one in content["datasets"])
    assert f"{root}/" not in text
    assert f"init.from={pretrained.relative_to(root.parent)}" in text
    monkeypatch.chdir(study.parent)
    assert reported(study)[0]["study"]["file"] == "study.yaml"


def test_compute_counts_each_run_once(made):
    compute = made[0]["compute"]
    assert compute["begun_with"] == {
        **{"runs": 1, "images": 640, "exaflops": pytest.approx(0.04)},
        **{"device_hours": pytest.approx(40 * 1.5 * 2 / 3600), "runs_without_device_hours": 0},
    }
    assert compute["all"]["runs"] == compute["reported"]["runs"] + 1 == 14


def test_choices_name_what_decided(made):
    content, _, read = made
    by = {choice["name"]: choice["decided_by"] for choice in content["choices"]}
    assert by["transfer-pets"] == {"split": "dev", "datasets": ["pets/dev"]}
    sha = next(one["manifest_sha256"] for one in content["datasets"] if one["name"] == "pets/dev")
    assert any("pets/dev" in word and sha in word for word in read.words)


def test_beside_table_2(made):
    content, _, read = made
    tables = {table["table"]: table for table in content["paper"]}
    assert set(tables) == {"2", "5", "6"} and tables["2"]["tasks"] == ["pets", "flowers"]
    assert {r["part"] for r in tables["2"]["results"]} == {"transfer"}  # from scratch is another protocol
    (huge,) = [row for row in table_2() if row.model == "ViT-H/14"]
    (row,) = [row for row in read.rows if row[:2] == ["Ours-JFT", "ViT-H/14"]]
    assert row[3:7] == [f"{value:.2f}" for value in (huge.pets, huge.pets_std, huge.flowers, huge.flowers_std)]
    assert any("not the paper's test images" in word.lower() for word in read.words)


@pytest.mark.slow
def test_vtab_has_both_means(root, tmp_path):
    for task in TASKS:
        write_data(root, f"vtab/{task}", against=[f"vtab/{task}"])
    write_run(tmp_path / "before", [f"data.root={root}", "data.train=pets/full"])
    parts = part(root, [f"vtab/{task}" for task in TASKS], selection={"metric": "dev/top1", "shared": True})
    parts["settings"]["init.from"] = str(tmp_path / "before")
    out = write_study(tmp_path, {"vtab": parts})
    content, _, read = reported(out)
    (score,) = content["vtab"]
    runs = json.loads((out / "results.json").read_text())["entries"]
    by_seed = [
        {run["dataset"]: run["metrics"]["validation/top1"] for run in runs if run["name"].endswith(f"full-seed{seed}")}
        for seed in (0, 1)
    ]
    over_tasks = [statistics.fmean(values.values()) for values in by_seed]
    of = lambda values, group: statistics.fmean(v for k, v in values.items() if TASKS[k].group == group)  # noqa: E731
    over_groups = [
        statistics.fmean(of(values, group) for group in ("natural", "specialized", "structured")) for values in by_seed
    ]
    for name, values in (("mean over 19 tasks", over_tasks), ("mean of the 3 group means", over_groups)):
        found = score["means"][name]
        assert (found["mean"], found["n"]) == (pytest.approx(statistics.fmean(values)), 2)
        assert found["std"] == pytest.approx(statistics.stdev(values))
        assert any(name in row for row in read.rows)
    check_numbers(content, read)
    clevr = next(row for row in read.rows if "clevr_count" in row)
    assert clevr[-len(table_9()) :] == [f"{row['clevr_count']:.2f}" for row in table_9().values()]


def test_runs_of_two_seeds_are_one_result(root, tmp_path):
    settings = [f"data.root={root}", "data.train=pets/full", "evaluation.validation=pets/test"]
    for seed, of_device in ((3, "batch.micro_max=4"), (4, "parallelism.compile=true")):
        write_run(tmp_path / f"seed{seed}", [*settings, of_device, f"seed={seed}"])
    content, _, read = reported(tmp_path / "seed3", tmp_path / "seed4")
    (result,) = [r for r in content["results"] if r["metric"] == "validation/top1"]
    assert result["n"] == 2 and result["seeds"] == [3, 4] and content["paper"] == []
    check_numbers(content, read)
    for seed in (3, 4):
        shutil.rmtree(tmp_path / f"seed{seed}" / "checkpoints")
    without, _, _ = reported(tmp_path / "seed3", tmp_path / "seed4")
    assert without["results"] == content["results"] and result["pretraining_samples"]


def test_branches_of_trunks_of_several_seeds_are_one_result_and_no_transfer(root, tmp_path):
    write_data(root, "cifar10")
    settings = {"data.root": str(root), "data.train": "cifar10/full", "evaluation.validation": "cifar10/test"}
    trunk = {"settings": {**settings, "schedule.decay": "constant"}, "seeds": [0, 1]}
    continued = {**settings, "init": {"step": 10, "continue": True}, "schedule.decay": "linear"}
    branch = {"from": ["trunk"], "take": ["seed"], "settings": continued}
    out = write_study(tmp_path, {"trunk": trunk, "branch": branch})
    content, _, read = reported(out)
    check_numbers(content, read)
    of = {r["part"]: r for r in content["results"] if r["metric"] == "validation/top1"}
    found = {part: (r["n"], r["seeds"], r["begins_with"]) for part, r in of.items()}
    assert found == dict.fromkeys(("trunk", "branch"), (2, [0, 1], None))
    # A thousandth an exaFLOP a step: the ten steps that trunk and branch share count once.
    assert of["branch"]["exaflops"] == pytest.approx(of["trunk"]["exaflops"]) == pytest.approx(0.04)
    assert {row["role"] for row in content["deduplication"]} == {"training"}
    assert not content["paper"], "nothing was fine-tuned"
    (summary,) = [one for one in json.loads((out / "results.json").read_text())["summaries"] if one["part"] == "branch"]
    assert (summary["seeds"], summary["from"]) == ([0, 1], "trunk-seed0, trunk-seed1")
    assert summary["metrics"]["validation/top1"]["mean"] == pytest.approx(of["branch"]["mean"])


def test_odd_names_stay_text(root, tmp_path):
    settings = [f"data.root={root}", "data.train=pets/full", "evaluation.validation=pets/test"]
    odd = tmp_path / 'a <script>alert(1)<b> $x$ & "'
    write_run(odd, settings)
    _, text, read = reported(odd)
    assert "script" not in read.tags and "<script" not in text and odd.name in read.words
    (tmp_path / "index.html").write_text(text)
    assert open_page(tmp_path / "index.html", tmp_path / "profile").console == []


def test_an_edited_recipe_and_a_changed_manifest_are_told(root, tmp_path):
    write_data(tmp_path, "mine", splits=("full",))
    write_run(tmp_path / "run", [f"data.root={tmp_path}", "data.train=mine/full"])
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    recipe["optimizer"]["lr"] = 0.5
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    path = tmp_path / "mine" / "full" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    path.write_text(json.dumps(manifest))
    content, _, read = reported(tmp_path / "run")
    assert any("optimizer.lr" in note for note in content["runs"][0]["notes"])
    assert any(word.startswith("Trained on a manifest that is not there") for word in read.words)


def test_data_that_have_gone_are_told(root, tmp_path):
    write_data(tmp_path, "gone", splits=("full",))
    settings = [f"data.root={tmp_path}", "data.train=gone/full", "evaluation.validation=gone/test"]
    write_run(tmp_path / "run", settings)
    (tmp_path / "gone").rename(tmp_path / "away")
    content, _, read = reported(tmp_path / "run")
    assert all(one["problem"] for one in content["datasets"])
    assert [row["status"] for row in content["deduplication"]] == ["unknown"] and read.holes == []


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("run/metrics.jsonl", '{"step": 10, "los', RecipeError),
        ("run/metrics.jsonl", None, RecipeError),
        ("run/DONE", '{"step": 4', DataError),
        ("results.json", '{"version": 1, "entries": [{"name": "a"}]}', DataError),
    ],
)
def test_a_damaged_source_is_told(root, tmp_path, file, content, expected):
    write_run(tmp_path / "run", [f"data.root={root}", "data.train=pets/full"])
    path = tmp_path / file
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(expected):
        gather([path.parent])


def test_what_is_no_source_is_told(study, pretrained, tmp_path):
    for sources in ([tmp_path], [tmp_path / "nowhere"], [pretrained, pretrained], [study, study]):
        with pytest.raises(RecipeError):
            gather(sources)


def test_the_command_writes_both_files_and_replaces_only_a_report(study, tmp_path):
    out = tmp_path / "report"
    for more in ([], ["--title", "Again"]):
        assert command("report", study, "-o", out, *more).returncode == 0
    content = json.loads((out / "results.json").read_text())
    assert content["title"] == "Again" and "Again" in Read((out / "index.html").read_text()).words
    before = (study / "results.json").read_bytes()
    for place in (study, study / "transfer-pets-lr0.3", out / "index.html"):
        assert command("report", study, "-o", place).returncode == RecipeError.exit_code
    with pytest.raises(RecipeError):
        write_report(study, gather([study]), "")
    assert (study / "results.json").read_bytes() == before


def test_without_matplotlib_nothing_is_read(study, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, message = command("report", study, "-o", tmp_path / "out").answer
    assert code == RecipeError.exit_code and "pip install" in message and not (tmp_path / "out").exists()
