"""Text of strangers, and secrets of users: what a command prints and leaves behind holds neither."""

import functools
import http.server
import io
import json
import os
import subprocess
import sys
import threading
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from data_tools.sources import SourceOptions, open_source
from data_tools.sources.parts import clean_path
from vitscale.about.studies.expansion import expand
from vitscale.about.studies.reading import Study
from vitscale.api.shown import Predictions
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.evaluation.prediction import Prediction
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.page import Facts, Folded, Section, Table, Text, draw, fragment, page_text, standalone
from vitscale.ground.safe_text import SafeStream, shown, without_secrets
from vitscale.ground.table import Column, Console, ResultTable
from vitscale.launch.clusters import Job, slurm
from vitscale.launch.pretraining import Pretraining
from vitscale.recipe import load_recipe, refuse_secrets

SECRET = "TOPSECRET"
RECIPE = Path(__file__).parent / "recipe.yaml"

# ---- Secrets in text -------------------------------------------------------------------------------------------------

WITH_SECRETS = {
    "s3://user:TOPSECRET@bucket/x": "s3://bucket/x",
    "HTTPS://u:TOPSECRET@[::1]:80/x": "HTTPS://[::1]:80/x",
    "https://TOPSECRET@host/x": "https://host/x",
    "https://u%3ATOPSECRET@host/x": "https://host/x",
    "sftp://u:%40TOPSECRET%2F@host": "sftp://host",
    "https://u:p@TOPSECRET@host:80/a@2x.jpg": "https://host:80/a@2x.jpg",
    "https://u:a/TOPSECRET@host/a@2x.jpg": "https://host/a@2x.jpg",
    "https://u:a:TOPSECRET@host/": "https://host/",
    "ftp://u:a?TOPSECRET#b@host/": "ftp://host/",
    "memory:///user:TOPSECRET@host/D": "memory:///host/D",
    "simplecache::s3://user:TOPSECRET@bucket/x": "simplecache::s3://bucket/x",
    "zip://a.jpg::https://u:TOPSECRET@host/a.zip?token=TOPSECRET": "zip://a.jpg::https://host/a.zip",
    "a,https://u:TOPSECRET@b/,-ftp://u:TOPSECRET@c": "a,https://b/,-ftp://c",
    "no ftp://u:TOPSECRET@h/x: gone (https://TOPSECRET@h)": "no ftp://h/x: gone (https://h)",
    "https://h/x?X-Amz-Credential=TOPSECRET&x-amz-signature=TOPSECRET: late": "https://h/x: late",
    "https://h/x?id=1&sig=TOPSECRET&b=2#access_token=TOPSECRET": "https://h/x?id=1&b=2",
    "https://h/x?sv=2&amp;sig=TOPSECRET%3D&amp;b=1": "https://h/x?sv=2&amp;b=1",
    "URL('https://h/x?AWSAccessKeyId=TOPSECRET&Signature=a%2BTOPSECRET&Expires=1')": "URL('https://h/x?Expires=1')",
    "h/x?api_key=TOPSECRET, and y": "h/x, and y",
    "https://h/x?a=1;token=TOPSECRET": "https://h/x?a=1",
    "https://h/x?u=https%3A%2F%2Fu%3ATOPSECRET%40h%3Fa%3D1%26sig%3DTOPSECRET": "https://h/x?u=https%3A%2F%2Fh%3Fa%3D1",
    "of /home/me/https:/u:TOPSECRET@h/x": "of /home/me/https:/h/x",  # as a path has it
    r"https:\/\/u:TOPSECRET@h\/x?a=1\u0026sig\u003dTOPSECRET": r"https:\/\/h\/x?a=1",
    "{'Authorization': 'Basic TOPSECRET', 'Range': 'x'}": "{'Authorization': '...', 'Range': 'x'}",
    "authorization: Bearer TOPSECRET": "authorization: ...",
    r"authorization: Basic TOP\SECRET": "authorization: ...",
    r'{"a": "authorization=TOPSECRET\"b"}': r'{"a": "authorization=...\"b"}',
    r'{"a": "authorization=TOPSECRET\\"}': '{"a": "authorization=..."}',
    "{'tracking.token': 'TOPSECRET', 'hub': {'API_KEY': \"a'TOPSECRET\"}}": (
        "{'tracking.token': '...', 'hub': {'API_KEY': \"...\"}}"
    ),
    json.dumps({"wandb-api-key": "TOPSECRET", "password": "TOPSECRET"}): json.dumps(
        {"wandb-api-key": "...", "password": "..."}
    ),
    json.dumps({"why": 'of "https://u:TOPSECRET@h/x?key=TOPSECRET"\nhere'}): json.dumps(
        {"why": 'of "https://h/x"\nhere'}
    ),
}
WITHOUT_SECRETS = [
    *("abfs://container@account.dfs.core.windows.net/x", "https://host:8080/a@b:c@d", "http://[::1]:80/a@b"),
    *("hf://datasets/o/n@main/a:b@c", "github://org:repo@main/x", "zip://x::s3://b/k?x", "sftp://user@host/x"),
    *("s3://b/a?keyword=1&monkey=2&design=3", "/a:b@c/d", "ask me@host: a://b", "https://host: ask x@y", "12:30@x"),
    *("https://h/get?id=1&w=2", "a?b=c", "&#34;key=1&#34; &lt;sig=2", "x = y & key=z"),
    '{"token": 3, "tokens": "x", "key": "y", "class_token": ""}',
]


@pytest.mark.parametrize("text", WITH_SECRETS)
def test_secrets_are_taken_out_of_text_and_nothing_else_is(text):
    assert without_secrets(text) == WITH_SECRETS[text]
    assert str(DataError(text)) == without_secrets(text) and SECRET not in str(RecipeError(f"of {text!r} {text}"))


def test_text_without_secrets_stays():
    assert list(map(without_secrets, WITHOUT_SECRETS)) == WITHOUT_SECRETS


UNITS = [
    *("x://a:b", "://", "?sig=a&", "%3a%2f%2fa", "authorization: ", "https://u:", "@:", "&a_", "?%", "aA-", " ", "\\"),
    *("'token':\"", "'a."),
]


@pytest.mark.parametrize("unit", UNITS)
def test_long_text_takes_no_longer_than_it_has_to(unit):
    text = f"https://u:{unit * 50_000}@"  # quadratic time would be an hour
    assert isinstance(shown(text), str)


KEYS = {
    "https://user:TOPSECRET@host/1.jpg?X-Amz-Signature=TOPSECRET": "host/1.jpg",
    "https://host/get?id=5&token=TOPSECRET": "host/get?id=5",
    "https://host/get?id=5": "host/get?id=5",
    "abfs://container@account/1.jpg": "container@account/1.jpg",
    "a@b:c/?key=1.jpg": "a@b:c/?key=1.jpg",  # a path
}


def test_keys_are_urls_without_secrets():
    assert {path: clean_path(path) for path in KEYS} == KEYS


SETTINGS = [
    *("data.root=memory://user:TOPSECRET@host/D", "data.train=https://TOPSECRET@host/D"),
    *("checkpoint.dir=simplecache::s3://user:TOPSECRET@bucket/c", "init.from=https://host/w.npz?sig=TOPSECRET"),
    "deepspeed.comet.api_key=TOPSECRET",
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_recipes_hold_no_secrets(setting, tmp_path):
    key, _, value = setting.partition("=")
    study = Study.model_validate({"parts": {"a": {"recipe": str(RECIPE), "settings": {key: value}}}})
    for refuse in (lambda: expand(study, tmp_path), lambda: refuse_secrets(load_recipe(RECIPE, [setting]), "r")):
        with pytest.raises(RecipeError) as refused:
            refuse()
        assert key.partition(".")[0] in str(refused.value) and SECRET not in str(refused.value)


# ---- Secrets in what commands print and leave behind -----------------------------------------------------------------


class _Guarded(http.server.SimpleHTTPRequestHandler):
    """Files for whom knows the password, whatever the query."""

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Basic {b64encode(b'user:TOPSECRET').decode()}":
            self.send_response(401)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.path = self.path.partition("?")[0]
        return super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path) -> Iterator[tuple[str, Path]]:
    """A URL with a password, and the folder that it shows."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(_Guarded, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://user:{SECRET}@127.0.0.1:{served.server_port}", folder
        served.shutdown()


class Commands:
    """Runs commands in a folder, and keeps what they print."""

    def __init__(self, folder: Path, **variables: str) -> None:
        (folder / "home").mkdir(parents=True)
        self.folder, self.printed = folder, ""
        self.variables = os.environ | {"HOME": str(folder / "home"), "TMPDIR": str(folder)} | variables

    def __call__(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "vitscale", *arguments],
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.printed += done.stdout
        assert done.returncode == code, done.stdout
        return done.stdout

    def check(self) -> None:
        """The secret is nowhere."""
        assert SECRET not in self.printed
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        assert files and [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_list_of_signed_urls_is_read_by_what_is_kept_of_them(server, tmp_path):
    url, folder = server
    (folder / "1.jpg").write_bytes(b"one")
    (tmp_path / "list.csv").write_text(f"image,label\n{url}/1.jpg?w=1&sig={SECRET},a\nplain.jpg,b\n")
    (tmp_path / "plain.jpg").write_bytes(b"two")
    source = open_source(str(tmp_path / "list.csv"), None, SourceOptions())
    items = list(source.items(0, Counter()))
    assert SECRET not in str(items) and [source.read(0, item.content) for item in items] == [b"one", b"two"]


@pytest.mark.slow
def test_a_conversion_of_signed_urls_leaves_no_secret(server, tmp_path, photos):
    url, folder = server
    for index, photo in enumerate(photos):
        (folder / f"{index}.jpg").write_bytes(photo if index else b"no image")
    work = tmp_path / "work"
    listed = tmp_path / "list.csv"
    rows = [f"{url}/{index}.jpg?w=1&X-Amz-Signature={SECRET},{'cat' if index % 2 else 'dog'}" for index in range(20)]
    listed.write_text("image,label\n" + "\n".join(rows) + "\n")
    run = Commands(work)
    run("convert", str(listed), "out", "--workers", "2", code=3)
    run.check()
    run("convert", str(listed), "out", "--workers", "2", "--max-reject-rate", "0.1")
    run("shards", "head", "out")
    run("shards", "verify", "out")
    run("shards", "export", "out", "exported")
    run("dedup", "index", str(listed), "--out", "index")
    run("dedup", "find", "out", "index", "--out", "found")
    run("convert", f"{url}/no", "out2", code=2)
    run("shards", "info", f"{url}/no", code=3)
    run("dedup", "index", f"{url}/no?token={SECRET}", "--out", "index2", code=2)
    run.check()


@pytest.mark.slow
def test_a_run_on_data_behind_a_password_leaves_no_secret(server, tmp_path):
    url, folder = server
    write_generated_dataset(folder / "train", [20, 13], seed=0)
    write_generated_dataset(folder / "test", [9], seed=1)
    work = tmp_path / "work"
    run = Commands(work, VITSCALE_DATA_ROOT=url, VITSCALE_CACHE=str(work / "cache"))
    run("launch", str(RECIPE), "--run-dir", "run", "--set", "data.root=" + url, code=2)
    run("recipe", str(RECIPE), "--set", "data.root=" + url)
    run("launch", str(RECIPE), "--run-dir", "failed", "--set", "data.train=nothing", code=3)
    run("launch", str(RECIPE), "--run-dir", "run", "--stop-at", "2")
    run("launch", str(RECIPE), "--run-dir", "run")
    run("evaluate", "run")
    run("evaluate", "run", "--set", f"data.root={url}/no", code=3)
    run("features", "run", f"{url}/test", "--out", "features")
    run("report", "run", "-o", "report")
    run("verify", "run")
    run("status", "run")
    run("recipe", str(RECIPE))
    run("doctor")
    run.check()
    assert "127.0.0.1" in (work / "report" / "results.json").read_text()


# ---- Terminals -------------------------------------------------------------------------------------------------------

CONTROLS = ["\x1b]0;owned\x07", "\x9b31m", "\r", "\b", "\x7f", "‮", "⁦", "\u2028", "\u200b", "\udcff", "\0"]


@pytest.mark.parametrize("control", CONTROLS)
def test_nothing_that_controls_a_terminal_is_printed(control):
    text = f"a{control}b"
    assert str(DataError(text)).isprintable()
    raw = io.StringIO()
    print(text, file=SafeStream(raw))
    assert raw.getvalue().removesuffix("\n").isprintable()
    console = Console(file=(screen := io.StringIO()), force_terminal=True, width=200, highlight=False)
    console.print(text, markup=False)
    console.print(f"[bold]{text}[/bold]")
    plain = screen.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert all(line.isprintable() for line in plain.split("\n")) and len(plain.split("\n")) == 3


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.filterwarnings("ignore:Glyph", "ignore:constrained_layout")
def test_a_page_shows_names_and_obeys_none(control):
    """A class name on pages, in drawings and in what notebooks show."""
    name = f"</td></svg><script>x</script>{control}$\\frac$"

    def put(figure: Any) -> None:
        panel = figure.subplots()
        panel.plot([1, 1000], [1, 2], label=name)
        panel.set(title=name, xlabel=name, xscale="log")
        panel.set_yticks([1, 2], [name.encode(errors="replace").decode()] * 2)
        panel.legend()

    drawing = draw("a", name, put, caption=name)
    table = Table(ResultTable([Column("a", name, is_text=True)], [{"a": name}]), caption=name)
    parts = [drawing, table, Text(name), Facts([(name, name)]), Folded(name, [])]
    predictions = Predictions([Prediction(name, [(name, 0.5)])])
    for page in (page_text(name, name, [Section(name, parts)]), fragment(parts), predictions._repr_html_()):
        assert "<script>x" not in page and page.count("</svg>") == page.count("<svg")
        assert all(line.isprintable() for line in page.split("\n")) and "\\frac$" in page
    assert "mathdefault" not in drawing.svg  # the labels of a logarithmic axis
    ElementTree.fromstring(standalone(put, "svg", width=300, height=200))


@pytest.mark.parametrize("argument", ["r.yaml", "--\x1b[2J=https://u:TOPSECRET@h\nlaunch: done"])
def test_what_a_mistake_names_controls_no_terminal_and_begins_no_line_of_its_own(tmp_path, argument):
    (tmp_path / "r.yaml").write_text('"a\\nlaunch: exit code 0 after 9 s: done\\u001b[2J": 1\n')
    shown = Commands(tmp_path)("recipe", argument, code=2)
    assert "\x1b" not in shown and SECRET not in shown
    assert not any(line.startswith("launch:") for line in shown.splitlines())


# ---- Scripts ---------------------------------------------------------------------------------------------------------

ENDS = ["\n", "\r", "\x0b", "\x85", "\u2028", "\0", "\x1b"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("place", ["run_dir", "setting", "folder", "name", "srun", "python", "sbatch"])
def test_a_batch_script_gets_no_line_of_a_stranger(end, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hostile = f"x{end}touch PWNED{end}#"
    given = {"srun": {"srun": f"'{hostile}'"}, "python": {"python": f"'{hostile}'"}, "sbatch": {"comment": hostile}}
    run_dir, folder, name = (hostile if place == one else one for one in ("run_dir", "folder", "name"))
    settings = (f"data.train={hostile}",) if place == "setting" else ()
    job = Job(Pretraining(str(RECIPE), settings, tmp_path / run_dir), options=given.get(place, {}))
    with pytest.raises(RecipeError):
        slurm.render_array([job], name, tmp_path / folder, "log")
    if place not in ("folder", "name"):
        with pytest.raises(RecipeError):
            slurm.render(job)


COUNTERS: dict[str, Callable[[Path, Path], object]] = {
    "a program": lambda path, _: path.write_text("0 a[$(touch PWNED)0]\n"),
    "no number": lambda path, _: path.write_text("0 08\n"),
    "a huge number": lambda path, _: path.write_text(f"{'9' * 30} {'9' * 30}\n"),
    "a link": Path.symlink_to,
    "a pipe": lambda path, _: os.mkfifo(path),
}


@pytest.mark.parametrize("put", COUNTERS.values(), ids=COUNTERS)
def test_a_batch_script_believes_only_numbers_in_a_run_directory(put, tmp_path, monkeypatch):
    """Run for real, with srun and scontrol that stand for Slurm's."""
    monkeypatch.chdir(tmp_path)
    for name, does in {"srun": "exit 75", "scontrol": "echo $1 >>requeued", "sleep": ":"}.items():
        Path(name).write_text(f"#!/bin/sh\n{does}\n")
        Path(name).chmod(0o755)
    (tmp_path / "thesis").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    put(run / ".slurm-7", tmp_path / "thesis")
    os.mkfifo(run / "launch.jsonl")
    script = slurm.render(Job(Pretraining(str(RECIPE), (), run), max_restarts=1))
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    codes = [
        subprocess.run(["bash", "-c", script], env=environment, capture_output=True, timeout=30).returncode
        for _ in range(3)
    ]
    assert codes == [0, 75, 75] and Path("requeued").read_text() == "requeue\n"
    assert not Path("PWNED").exists() and (tmp_path / "thesis").read_text() == "mine"
