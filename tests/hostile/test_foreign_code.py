"""No name, file or message of a stranger becomes code: what is imported, unpickled, and sent from rank to rank."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hostile.rank_work import be_attacked, exchange, train_and_prove
from hostile.strange_files import NO_HANG
from training.ranks import make_data, start

import vitscale
from vitscale.about.studies.results import read_results
from vitscale.cli.main import COMMANDS
from vitscale.ground.errors import RecipeError, VitscaleError
from vitscale.launch.clusters import find_cluster
from vitscale.recipe import load_recipe
from vitscale.runs.directory import read_newest
from vitscale.runs.done import read_done
from vitscale.runs.reading import read_object

ROOT = Path(vitscale.__file__).parents[1]
NAMES = ["evil", "evil.Thing", "evil:Thing", ".evil", "..evil", "vitscale.evil", "os.path", "__main__.x", "evil\n", ""]


@pytest.fixture
def evil(tmp_path, monkeypatch) -> Path:
    """A module that could be imported, in the current folder; the file that it leaves if it is."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "imported"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_nobody_allowed_imports_nothing(name, evil):
    keys = ("model.family", "objective.kind", "optimizer.name", "objective.implementation")
    for setting in (*(f"{key}={json.dumps(name)}" for key in keys), f"data.operations=[{{kind: {json.dumps(name)}}}]"):
        with pytest.raises(RecipeError):
            load_recipe("b16_i1k", [setting])
    with pytest.raises((ImportError, ValueError)):
        find_cluster(name or "evil")
    with pytest.raises(AttributeError):
        getattr(vitscale, name or "evil")
    assert not evil.exists() and "evil" not in sys.modules


def test_a_command_is_one_of_those_listed(evil):
    assert all(target.partition(":")[0].isidentifier() for target, _ in COMMANDS.values())
    for name in ("evil", "..evil"):
        done = subprocess.run([sys.executable, "-m", "vitscale", name], capture_output=True, text=True)
        assert done.returncode == 2 and "Traceback" not in done.stderr
    assert not evil.exists()


def test_no_file_is_a_program():
    """Of what could run code, the source calls only what reads data alone."""
    found = set()
    for path in (*ROOT.glob("vitscale/**/*.py"), *ROOT.glob("data_tools/**/*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            options = {each.arg: ast.unparse(each.value) for each in call.keywords}
            called = ast.unparse(call.func)
            if called in ("torch.load", "np.load"):
                assert options.get("weights_only") == "True" or options.get("allow_pickle") == "False", path
            if called.endswith("import_module"):
                begins = ast.unparse(call.args[0]).lstrip("f'\"")
                found.add(path.name if not begins.startswith(("vitscale.", "{__name__}.")) else "")
            loads = called in ("eval", "exec", "compile", "__import__", "yaml.load") or "unsafe" in called
            assert not loads and not called.startswith(("pickle.", "marshal.", "shelve.", "dill.", "runpy.")), path
    assert found == {"", "extensions.py"}


CONTENTS = {
    "nothing": b"",
    "another type": b"[1]",
    "deep": b'{"a":' * 100_000,
    "a long number": b'{"step": ' + b"9" * 100_000 + b"}",
    "not UTF-8": b'{"a": "\xff"}',
    "NaN": b'{"step": NaN, "place": Infinity, "entries": NaN, "version": 1}',
    "twice": b'{"entries": [], "entries": 3, "version": 1, "step": 1, "step": []}',
    "half a character": b'{"step": "\\ud800", "entries": "\\ud800", "version": 1}',
}


@NO_HANG
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_what_a_small_file_holds_is_a_plain_object_or_nothing(content, tmp_path):
    for name in ("newest-checkpoint.json", "DONE", "results.json"):
        (tmp_path / name).write_bytes(content)
    assert read_newest(tmp_path) is None
    assert read_done(tmp_path) is None or isinstance(read_done(tmp_path), dict)
    found = read_object(tmp_path / "results.json")
    assert found is None or found == json.loads(content, parse_constant=lambda name: None)
    try:
        assert read_results(tmp_path) is None
    except VitscaleError as error:
        assert str(error).isprintable()


def test_a_training_that_is_continued_and_a_proof_exchange_no_pickle(tmp_path):
    make_data(tmp_path)
    start(train_and_prove, tmp_path, None, 2)
    assert [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in (0, 1)] == [[[], True], [[], None]]
    assert (tmp_path / "run" / "DONE").exists()


def test_values_arrive_to_the_last_bit_and_errors_with_their_class(tmp_path):
    start(exchange, tmp_path, None, 2)
    first, other = (json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in (0, 1))
    assert first[0] == other[0] and first[0][::2] == ["MachineError", True]
    assert first[1][0] == "OwnError" and other[1] == ["MachineError", first[1][1], True]
    # A bug keeps its exception, and so its trace, where it is; the others end as those that have lost a rank.
    assert first[2] == ["ZeroDivisionError", "a bug", None] and other[2][0] == "PeerLostError"
    assert first[3][0] == "TypeError" and other[3][0] == "PeerLostError"
    assert first[4] == other[4] == ["VitscaleError", "", True]


@pytest.mark.parametrize("attack", ["gather", "broadcast", "-1", "0", str(1 << 45)])
def test_a_rank_that_was_taken_over_runs_no_code_elsewhere(tmp_path, attack):
    start(be_attacked, tmp_path, attack, 2)
    assert (tmp_path / "outcome").read_text() == "PeerLostError" and not (tmp_path / "ran").exists()
