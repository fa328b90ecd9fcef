"""A certificate of a run, checked by a program that needs Python alone: one bit in any input is named."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import launch, make_data
from typer.testing import CliRunner

from vitscale.cli.main import app
from vitscale.errors import DataError, RecipeError
from vitscale.replay.check_certificate import merkle_root

# RFC 6962's tree over the test data of its reference implementation: number of leaves -> root.
DATA = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
ROOTS = {
    0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}


@pytest.mark.parametrize("count", ROOTS)
def test_the_tree_is_that_of_rfc_6962(count):
    leaves = [hashlib.sha256(b"\0" + bytes.fromhex(text)).digest() for text in DATA[:count]]
    assert merkle_root(leaves).hex() == ROOTS[count]


def certify(*arguments):
    result = CliRunner().invoke(app, ["certificate", *map(str, arguments)])
    if isinstance(result.exception, Exception):
        raise result.exception
    return result.stdout.split()[-1]


def checked(run, *places):
    """Exit code and output of the program beside the certificate, without our packages."""
    command = [sys.executable, "-I", "-S", str(run / "check_certificate.py"), str(run / "certificate.json"), *places]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return result.returncode, result.stdout


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """A run of one step, its data, a report of two files, and its root."""
    root = tmp_path_factory.mktemp("certified")
    make_data(root)
    launch(root, [{"name": "run", "stops": [None], "blocks": [{"schedule": {"duration": {"steps": 1}}}]}], 1)
    (root / "report" / "inner").mkdir(parents=True)
    (root / "report" / "results.json").write_text("{}")
    (root / "report" / "inner" / "page.html").write_text("page")
    return root, certify(root / "runs" / "run", "--report", root / "report")


def places_of(root):
    return [f"train={root / 'train'}", f"validation={root / 'test'}", f"report={root / 'report'}"]


def test_what_is_as_it_was_passes_and_places_that_are_not_given_are_said(certified):
    root, found = certified
    run = root / "runs" / "run"
    code, output = checked(run, *places_of(root))
    assert code == 0 and found in output and "not looked at" not in output
    code, output = checked(run)
    assert code == 0 and output.count("not looked at") == 3
    assert checked(run, f"trian={root / 'train'}")[0] == 2  # a place that the certificate does not have
    assert certify(run, "--report", root / "report") == found  # the same again


def test_one_bit_of_any_file_is_named(certified, tmp_path):
    root, _ = certified
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    run = copy / "runs" / "run"
    folders = {"run": run, "train": copy / "train", "validation": copy / "test", "report": copy / "report"}
    files = json.loads((run / "certificate.json").read_text())["files"]
    names = {entry["name"] for entry in files}
    assert {
        "run/recipe.yaml",
        "run/metrics.jsonl",
        "run/DONE",
        "train/manifest.json",
        "report/inner/page.html",
    } <= names
    assert any(name.startswith("run/checkpoints/") and name.endswith(".safetensors") for name in names)
    for entry in files:
        place, _, inside = entry["name"].partition("/")
        path = folders[place] / inside
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        code, output = checked(run, *places_of(copy))
        path.write_bytes(content)
        assert code == 1 and [line.split()[1] for line in output.splitlines() if line.startswith("BAD")] == [
            f"{entry['name']}:"
        ]


def test_an_edited_certificate_is_told(certified, tmp_path):
    root, _ = certified
    run = tmp_path / "run"
    shutil.copytree(root / "runs" / "run", run)
    content = json.loads((run / "certificate.json").read_text())
    for edit in (
        lambda c: c["about"]["done"].update(exaflops=1),
        lambda c: c["files"].pop(),
        lambda c: c["files"][0].update(sha256="0" * 64),
    ):
        other = json.loads(json.dumps(content))
        edit(other)
        (run / "certificate.json").write_text(json.dumps(other))
        code, output = checked(run)
        assert code == 1 and "certificate:" in output
    for text in ("", "{}", json.dumps(content | {"version": 9}), json.dumps(content | {"files": [{"name": "../x"}]})):
        (run / "certificate.json").write_text(text)
        assert checked(run)[0] == 2


def test_what_cannot_be_certified_is_said(certified, tmp_path):
    root, _ = certified
    with pytest.raises(RecipeError):
        certify(tmp_path)
    run = tmp_path / "run"
    shutil.copytree(root / "runs" / "run", run)
    with pytest.raises(DataError):
        certify(run, "--data-root", tmp_path)
    with pytest.raises(DataError):
        certify(run, "--report", tmp_path / "none")
    bare = shutil.copytree(run, tmp_path / "bare")
    (bare / "metrics.jsonl").unlink()
    with pytest.raises(DataError):
        certify(bare)
    (run / "DONE").unlink()
    with pytest.raises(RecipeError):
        certify(run)


def test_the_program_is_short_and_imports_nothing_but_the_standard_library():
    source = Path(sys.modules[merkle_root.__module__].__file__).read_text()
    assert len(source.splitlines()) <= 200
