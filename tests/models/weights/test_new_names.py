"""A file or folder of weights has its name when it is whole, and takes it from nobody."""

import shutil
import signal
import sys
from typing import Any

import pytest
import torch
from models.weights.exported import SUFFIX, TINY, described, differing, loaded, valued, write, written

from vitscale.cli.export import export
from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.models.weights import write_weights

FORMATS = pytest.mark.parametrize("form", list(SUFFIX))


@FORMATS
def test_of_two_writers_of_one_name_the_first_has_it(form, tmp_path):
    description = described(TINY)
    first, second = valued(description), valued(description, seed=1)
    path = tmp_path / f"{form}{SUFFIX[form]}"
    of_second = {name: parameter.detach() for name, parameter in second.named_parameters()}

    def overtaken(name: str) -> torch.Tensor:
        if not path.exists():
            write(first, description, form, tmp_path)
        return of_second[name]

    with pytest.raises(RecipeError, match=path.name):
        write_weights(path, form, description, overtaken)
    assert differing(first, loaded(description, path)) == []
    assert list(tmp_path.iterdir()) == [path]


@FORMATS
def test_a_dangling_link_is_something(form, tmp_path):
    description = described(TINY)
    path = tmp_path / f"{form}{SUFFIX[form]}"
    path.symlink_to("nowhere")
    with pytest.raises(RecipeError, match=path.name):
        write_weights(path, form, description, lambda name: pytest.fail("found out too late"))
    assert path.is_symlink() and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", ["hf", "npz"])
def test_what_is_written_has_the_usual_mode(form, tmp_path):
    path, *_ = written(tmp_path, form)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    usual = tmp_path / ("folder" if form == "hf" else "file")
    assert path.stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize("form", ["hf", "timm"])
def test_an_interrupt_says_that_nothing_was_written(form, tmp_path, capsys):
    parts: list[str] = []

    def interrupt(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not parts and str(arguments[0]).startswith(f"{tmp_path}/.out"):
            parts.append(str(arguments[0]))
            signal.raise_signal(signal.SIGINT)

    sys.addaudithook(interrupt)  # a signal of another thread comes too late where this one is slow
    with pytest.raises(KeyboardInterrupt):
        export("ViT-Ti/16", form, tmp_path / f"out{SUFFIX[form]}", num_classes=1000)
    assert capsys.readouterr().err == "interrupted: nothing was written\n"
    assert parts and list(tmp_path.iterdir()) == []


def test_no_room(tmp_path):
    num_classes = shutil.disk_usage(tmp_path).free // (4 * 192) + 1
    if num_classes > 10**9:
        pytest.skip("the disk has room for any head")
    with pytest.raises(CheckpointError, match=r"\d bytes"):
        export("ViT-Ti/16", "npz", tmp_path / "a.npz", num_classes=num_classes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["npz", "hf"])
def test_values_that_are_not_finite_are_told(form, tmp_path, capsys):
    description = described(TINY)
    model = valued(description)
    with torch.no_grad():
        model.blocks[1].norm1.bias[3] = torch.inf
        model.norm.weight[0] = torch.nan
    write(model, description, form, tmp_path)
    said = capsys.readouterr().out
    assert said.count("NaN or infinite") == 1 and said.startswith("blocks.1.norm1.bias holds")
