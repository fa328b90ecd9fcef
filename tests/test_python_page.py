"""docs/python.md and docs/notebook.ipynb, taken at their word: on real photos, in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from pictures import unpack_photos

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture
def folder(tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    unpack_photos(data_root / "clothing" / "train.tar", tmp_path / "photos", 12)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return tmp_path


def test_the_blocks_of_the_page_run_one_after_the_other(folder):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "python.md").read_text(encoding="utf-8"), re.M | re.S)
    script = folder / "page.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "there is no such run, file or folder" in done.stdout  # the last block's mistake
    assert {file.suffix for file in folder.glob("*.*")} >= {".png", ".safetensors"}
    assert (folder / "runs/again/DONE").exists()


@pytest.mark.slow  # the page calls the same
def test_the_notebook_runs_in_a_kernel(folder):
    notebook = nbformat.read(DOCS / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    # The kernel of this environment, whatever kernels the user has.
    notebook.metadata.kernelspec.name = "python3"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute(
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    )
    shown = [
        output.data["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "data" in output and "text/html" in output.data
    ]
    assert len(shown) == 7, "dataset, recipe, run, curves, predictions, results, attention"
    assert sum("<svg" in html for html in shown) == 2 and not any("<script" in html for html in shown)
    (progress,) = (cell for cell in notebook.cells if cell.source.startswith("run = vs.train"))
    assert any("launch: exit code 0" in output.get("text", "") for output in progress.outputs)
