"""The commands as people type them: real processes, their exit codes and what they print."""

import fcntl
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from commands import command
from small_files import edit_manifest, flip_images
from training.ranks import BASE, STEPS

from vitscale.data.shards.generated import write_generated_dataset
from vitscale.ground.errors import VitscaleError
from vitscale.ground.machine import free_port
from vitscale.pretrain import parse_arguments
from vitscale.pretrain import pretrain as pretrain_rank

REPOSITORY = Path(__file__).resolve().parent.parent
PRETRAIN = REPOSITORY / "vitscale" / "pretrain.py"


def program(name: str) -> str:
    return shutil.which(name, path=str(Path(sys.executable).parent)) or name


def run(*command: str | Path, cwd: Path = REPOSITORY, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "VITSCALE_DATA_ROOT"} | variables
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300, check=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the toy data and `toy.yaml`, whose run is 2 x 8 samples a step."""
    place = tmp_path_factory.mktemp("commands")
    write_generated_dataset(place / "data" / "train", [24, 24, 9], seed=1)
    write_generated_dataset(place / "data" / "test", [13], seed=2)
    write_generated_dataset(place / "data" / "other", [13], seed=3)
    (place / "toy.yaml").write_text(yaml.safe_dump(BASE))
    return place


def toy_options(place: Path, *arguments: str | Path) -> list[str]:
    return ["--recipe", str(place / "toy.yaml"), "--set", f"data.root={place / 'data'}", *map(str, arguments)]


def pretrain(place: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """One rank, by plain python."""
    return run(sys.executable, PRETRAIN, *toy_options(place, *arguments), cwd=place, **variables)


@pytest.fixture
def pretrain_here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """One rank in this process, which saves the seconds of a start; for what ends before the training begins.

    Returns the exit code and the message.
    """
    launched = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    launched["MASTER_PORT"] = free_port()
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))

    def pretrain_here(*arguments: str | Path) -> tuple[int, str]:
        with pytest.raises(VitscaleError) as caught:
            pretrain_rank(parse_arguments(toy_options(place, *arguments)))
        return caught.value.exit_code, str(caught.value)

    return pretrain_here


@pytest.fixture(scope="module")
def two_rank_run(place: Path) -> Path:
    """The README's command, stopped by one launcher and continued by another; its run directory."""
    script = ["vitscale/pretrain.py", "--recipe", place / "toy.yaml"]
    script += ["--set", f"data.root={place / 'data'}", "--run-dir", place / "run"]
    deepspeed = [program("deepspeed"), "--num_accelerators", "2", "--master_port", free_port()]
    torchrun = [program("torchrun"), "--nproc-per-node", "2", "--master-port", free_port()]
    first = run(*deepspeed, *script, "--stop-at", "4")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "--stop-at" in first.stdout
    assert not (place / "run" / "DONE").exists()
    second = run(*torchrun, *script)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "step 4 of 6" in second.stdout
    return place / "run"


def test_the_launchers_train_stop_and_resume(two_rank_run):
    lines = [json.loads(line) for line in (two_rank_run / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == list(range(1, STEPS + 1))
    expected = {"step", "loss", "lr", "grad_norm", "images_per_s", "data_wait_s", "step_time_s", "exaflops"}
    # Nobody knows a CPU's peak, so there is no mfu.
    expected |= {"slowest_rank", "slowest_rank_s", "median_rank_s"}
    expected |= {"time", "epoch", "images_seen"}
    assert set(training[0]) == expected | {"world_size", "peak_memory_bytes", "batch_digest"}
    assert json.loads((two_rank_run / "DONE").read_text())["step"] == STEPS


def test_a_finished_run_says_so(place, two_rank_run):
    again = pretrain(place, "--run-dir", two_rank_run)
    assert again.returncode == 0 and "finished run; nothing to do" in again.stdout


def test_another_recipe_in_the_same_directory_shows_the_difference(pretrain_here, two_rank_run):
    code, message = pretrain_here("--run-dir", two_rank_run, "--set", "optimizer.lr=1.0")
    assert code == 2 and "optimizer.lr: 0.003 -> 1.0" in message


def test_a_second_launch_in_a_directory_in_use_is_refused(place, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = pretrain(place, "--run-dir", run_dir)
    assert second.returncode == 2 and "in use by another launch" in second.stderr


@pytest.mark.slow
def test_a_failing_last_evaluation_leaves_the_weights(place, tmp_path):
    """The default saves at the end only, and the end is also when the test data are first looked at."""
    data = tmp_path / "data"
    shutil.copytree(place / "data", data)
    shard = data / "test" / "shard-00000.beton"
    flip_images(shard, 0)
    arguments = ["--run-dir", tmp_path / "run", "--set", f"data.root={data}"]
    first = pretrain(place, *arguments)
    assert first.returncode == 3 and "shard-00000.beton" in first.stderr, first.stdout + first.stderr
    again = pretrain(place, *arguments, "--set", "evaluation.validation=other")
    assert again.returncode == 0 and f"at step {STEPS} of {STEPS}" in again.stdout, again.stdout + again.stderr


@pytest.mark.slow
def test_evaluation_on_training_samples_is_refused_before_any_work_unless_it_is_meant(place, tmp_path):
    arguments = ["--run-dir", tmp_path / "run", "--set", "evaluation.validation=train"]
    refused = pretrain(place, *arguments)
    assert refused.returncode == 3 and "57 of the 57" in refused.stderr, refused.stdout + refused.stderr
    assert "evaluation.overlap=allow" in refused.stderr and not list(tmp_path.rglob("step-*"))
    meant = pretrain(place, *arguments, "--set", "evaluation.overlap=allow")
    assert meant.returncode == 0 and "57 of the 57" in meant.stdout, meant.stdout + meant.stderr
    told = run(program("vitscale"), "evaluate", tmp_path / "run", "--data", place / "data" / "train", cwd=place)
    assert told.returncode == 0 and "57 of the 57" in told.stderr, told.stderr


def test_evaluate_agrees_with_the_run(two_rank_run):
    result = run(program("vitscale"), "evaluate", two_rank_run, "--json")
    assert result.returncode == 0, result.stderr
    done = json.loads((two_rank_run / "DONE").read_text())
    assert json.loads(result.stdout)["validation/top1"] == done["evaluation"]["validation/top1"]


def test_evaluate_refuses_images_of_another_size(two_rank_run):
    code, message = command("evaluate", two_rank_run, "--set", "data.image_size=64").answer
    assert code == 3 and "pos_embedding" in message


def test_evaluate_takes_the_model_that_was_trained(two_rank_run, tmp_path):
    edited = tmp_path / "run"
    shutil.copytree(two_rank_run, edited)
    text = (edited / "recipe.yaml").read_text()
    assert "num_heads: 2" in text
    (edited / "recipe.yaml").write_text(text.replace("num_heads: 2", "num_heads: 4"))
    one, other = (command("evaluate", run_dir, "--json").answer for run_dir in (two_rank_run, edited))
    assert one == other and one[0] == 0 and "validation/top1" in one[1]


def test_evaluate_refuses_other_classes(place, two_rank_run, tmp_path):
    dataset = tmp_path / "other"
    shutil.copytree(place / "data" / "other", dataset)
    edit_manifest(dataset, lambda manifest: manifest["class_names"].__setitem__(2, "azure"))
    code, message = command("evaluate", two_rank_run, "--set", f"evaluation.validation={dataset}").answer
    assert code == 3 and all(name in message for name in ("2", "'azure'", "'blue'"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--set", "optimizer.lrr=1"], 2, ["optimizer.lrr", "did you mean 'optimizer.lr'"]),
        (["--set", "batch.global=4096"], 2, ["57 samples", "4096"]),
        (["--set", "data.train=nowhere"], 3, ["nowhere", "there is no"]),
        (["--set", "model.num_classes=5"], 2, ["7 classes", "5"]),
        (["--set", "deepspeed={zero_optimisation: {}}"], 2, ["zero_optimization"]),
        (["--set", "deepspeed={wandb: {enabled: true}}"], 2, ["deepspeed.wandb", "logging.trackers"]),
        (["--stop-at", "0"], 2, ["--stop-at"]),
        (["--set", "checkpoint.every.examples=15"], 2, ["checkpoint.every: 15 examples", "one step of 16"]),
    ],
)
def test_mistakes_are_found_before_the_training_begins(pretrain_here, tmp_path, arguments, code, words):
    found, message = pretrain_here(*arguments, "--run-dir", tmp_path / "run")
    assert found == code and all(word in message for word in words), message
    assert not torch.distributed.is_initialized()


@pytest.fixture
def damaged(place, tmp_path):
    """A copy of the data with one flipped byte in slot 3 of its second shard, and the uid there."""
    data = tmp_path / "data"
    shutil.copytree(place / "data", data)
    flip_images(data / "train" / "shard-00001.beton", 3)
    return data, 27


def test_a_damaged_shard_ends_both_ranks_with_the_sample_s_name(place, damaged, tmp_path):
    """One rank meets it; it says so, nobody hangs, and the launcher passes its exit code on."""
    data, uid = damaged
    result = run(
        *(program("deepspeed"), "--num_accelerators", "2", "--master_port", free_port(), PRETRAIN),
        *("--recipe", place / "toy.yaml", "--set", f"data.root={data}", "--set", "data.verify_shards=false"),
        *("--run-dir", tmp_path / "run"),
        cwd=tmp_path,
    )
    assert result.returncode == 3, result.stdout + result.stderr
    assert "shard-00001.beton" in result.stderr and f"uid {uid}" in result.stderr and "Traceback" not in result.stderr


def test_a_shard_that_is_not_the_manifest_s_is_found_before_the_first_step(place, damaged, tmp_path):
    command = (sys.executable, PRETRAIN, "--recipe", place / "toy.yaml", "--set", f"data.root={damaged[0]}")
    result = run(*command, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert result.returncode == 3 and "Traceback" not in result.stderr, result.stdout + result.stderr
    assert "shard-00001.beton" in result.stderr and "vitscale shards verify" in result.stderr


@pytest.mark.slow
def test_the_demo_reaches_its_accuracy(tmp_path):
    result = run(program("vitscale"), "demo", "--out", tmp_path / "demo")
    assert result.returncode == 0, result.stdout + result.stderr
    done = json.loads((tmp_path / "demo" / "run" / "DONE").read_text())
    assert done["evaluation"]["validation/top1"] >= 0.93
    assert "test accuracy" in result.stdout and "resumed from" in result.stdout


def test_a_profile_says_where_a_step_goes(place, tmp_path):
    """Two micro-batches a step on one rank; of six steps the fourth and fifth are profiled."""
    result = pretrain(place, "--run-dir", tmp_path / "run", "--set", "profile.steps=2")
    assert result.returncode == 0 and "step-00000005.txt" in result.stdout, result.stderr
    table = (tmp_path / "run" / "profile" / "step-00000005.txt").read_text()
    rows = [line.split(maxsplit=3) for line in table.replace(",", "").splitlines() if "%" in line]
    parts = {name: (float(seconds), float(calls)) for seconds, _, calls, name in rows}
    assert "Steps 4 to 5" in table and parts["forward"][1] == parts["backward"][1] == 2
    with gzip.open(tmp_path / "run" / "profile" / "step-00000005.pt.trace.json.gz", "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("name") == "vitscale: forward"]
    spans = [event["dur"] for event in events if event.get("cat") == "user_annotation"]
    assert len(spans) == 4 and sum(spans) / 2e6 == pytest.approx(parts["forward"][0], rel=0.05)

    short = pretrain(place, "--run-dir", tmp_path / "short", "--set", "profile.steps=4")
    assert short.returncode == 0 and "no profile: 4 steps after the first 3 need 7, not 6" in short.stdout


@pytest.mark.parametrize("missing", ["g++", "openssl"])
def test_compiling_without_what_torch_compiles_with_is_refused_before_the_first_step(place, tmp_path, missing):
    for found in {"g++", "openssl"} - {missing}:
        (tmp_path / found).symlink_to(shutil.which(found))
    arguments = ["--run-dir", tmp_path / "run", "--set", "parallelism.compile=true"]
    result = pretrain(place, *arguments, PATH=str(tmp_path))
    assert result.returncode == 2 and missing in result.stderr and "Traceback" not in result.stderr


@pytest.mark.slow
def test_output_that_nobody_takes_ends_no_run(place, tmp_path):
    """A reader of a pipe that has ended, a disk for the log that is full, no standard output at all."""
    command = [sys.executable, str(PRETRAIN), *toy_options(place)]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([*command, "--run-dir", str(tmp_path / "full")], stdout=full, stderr=subprocess.PIPE)
    assert ended.returncode == 0 and (tmp_path / "full" / "DONE").exists(), ended.stderr
    for name, line in (("pipe", '"$@" | true; exit "${PIPESTATUS[0]}"'), ("closed", '"$@" >&-')):
        ended = run("bash", "-c", line, "bash", *command, "--run-dir", tmp_path / name)
        assert ended.returncode == 0 and (tmp_path / name / "DONE").exists(), ended.stderr


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_away_does_not_begin_again(place, tmp_path):
    run_dir, above = tmp_path / "run", tmp_path / "above"
    arguments = ["--run-dir", run_dir, "--set", f"checkpoint.dir={above}"]
    assert pretrain(place, *arguments, "--stop-at", "3").returncode == 0
    metrics = (run_dir / "metrics.jsonl").read_text()

    (above / "run").rename(tmp_path / "elsewhere")
    lost = pretrain(place, *arguments)
    assert lost.returncode == 3 and "saved step 3" in lost.stderr and str(above / "run") in lost.stderr
    other = pretrain(place, "--run-dir", run_dir)
    assert other.returncode == 3 and all(name in other.stderr for name in ("checkpoint.dir", "--run-dir"))
    shutil.rmtree(above)
    unmounted = pretrain(place, *arguments)
    assert unmounted.returncode == 75 and "Is its file system mounted?" in unmounted.stderr
    assert (run_dir / "metrics.jsonl").read_text() == metrics

    above.mkdir()
    (tmp_path / "elsewhere").rename(above / "run")
    unwilling = pretrain(place, "--run-dir", tmp_path / "new" / "run", *arguments[2:], "--resume", "never")
    assert unwilling.returncode == 2 and all(
        part in unwilling.stderr for part in (str(above / "run"), "--resume never")
    )
    (tmp_path / "link").symlink_to(run_dir)
    (run_dir / "DONE").touch()
    back = pretrain(place, "--run-dir", tmp_path / "link", *arguments[2:])
    assert back.returncode == 0 and "step 3 of 6" in back.stdout and "DONE" in back.stdout
    assert json.loads((run_dir / "DONE").read_text())["step"] == STEPS
