"""What an export predicts in its own library, from photos as their files are, is what `vitscale evaluate` says."""

import json
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from finished_runs import evaluate_run
from models.weights.exported import TINY, described, finished_run, printed_lines, valued

from vitscale.cli.convert import Machine, Request, convert
from vitscale.cli.export import export
from vitscale.data.augmentation import EvalTransform
from vitscale.data.image_operations import to_model_input
from vitscale.data.loader import Loader
from vitscale.data.order import EvalOrder
from vitscale.data.shards import Manifest
from vitscale.recipe import EvalCrop

SIZE = 64
CROPS = {"central": EvalCrop(kind="central", fraction=0.8), "square": EvalCrop(kind="square", fraction=0.8)}

# As a user would: the printed lines, a photo, the most probable class. Without torchvision, transformers has Pillow.
PREDICT = """
import json, sys
from pathlib import Path
library, torchvision, folder, lines = sys.argv[1:]
if torchvision == "absent":
    sys.modules["torchvision"] = None
import torch
from PIL import Image
if library == "hf":
    import transformers
else:
    import timm, timm.data
exec(lines)
model.eval()
found = {}
with torch.no_grad():
    for path in sorted(Path(folder).rglob("*.jpg")):
        photo = Image.open(path).convert("RGB")
        if library == "hf":
            index = model(**processor(photo, return_tensors="pt")).logits.argmax().item()
            name = model.config.id2label[index]
        else:
            index = model(transform(photo)[None]).argmax().item()
            name = model.pretrained_cfg["label_names"][index]
        found[path.relative_to(folder).as_posix()] = name
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def clothes(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 341 photos of ten classes in `photos`, most of them 400 x 533, and the dataset of them."""
    root = tmp_path_factory.mktemp("clothes")
    with tarfile.open(data_root / "clothing" / "validation.tar") as archive:
        archive.extractall(root / "unpacked", filter="data")
    (root / "unpacked" / "validation").rename(root / "photos")
    convert(Request(str(root / "photos")), root / "dataset", Machine(workers=1))
    return root


def seen(dataset: Path, crop: EvalCrop) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """(keys, images (B, H, W, 3), labels (B,)): what evaluation shows a model."""
    manifest = Manifest.load(str(dataset))
    keys: dict[int, str] = {}
    for table in dataset.glob("*.idx.parquet"):
        columns = pq.read_table(table, columns=["uid", "key"]).to_pydict()
        keys |= dict(zip(columns["uid"], columns["key"], strict=True))
    order = EvalOrder([shard.num_selected for shard in manifest.shards], manifest.num_samples)
    (batch,) = Loader(manifest, order, image_size=SIZE, transform=EvalTransform(crop.kind, crop.fraction))
    return [keys[uid] for uid in batch.uids.tolist()], batch.images.clone(), batch.labels.clone()


@cache
def run(clothes: Path, kind: str) -> tuple[Path, float, dict[str, str]]:
    """(directory, top-1, key -> predicted class) of a run that knows these photos better than chance.

    Its head is fitted by least squares to random features, which takes a second. The features see blocks of 4 x 4
    pixels: single ones, which differ between any two ways to resize, decide little in trained models too.
    """
    crop = CROPS[kind]
    keys, images, labels = seen(clothes / "dataset", crop)
    names = Manifest.load(str(clothes / "dataset")).class_names
    model = valued(described(TINY, SIZE, len(names)))
    inputs = to_model_input(images, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        patches = model.embedding.weight.view(-1, 2, 4, 2, 4, 3)
        patches.copy_(4 * patches.mean((2, 4), keepdim=True).expand_as(patches))
        x = torch.cat([model(inputs).pooled, torch.ones(len(labels), 1)], 1).double()
        targets = torch.nn.functional.one_hot(labels, len(names)).double()
        fitted = torch.linalg.solve(x.T @ x + 30 * torch.eye(x.shape[1]), x.T @ targets).float()
        model.head.weight.copy_(fitted[:-1].T)
        model.head.bias.copy_(fitted[-1])
        predicted = model(inputs).logits.argmax(1).tolist()
    folder = finished_run(
        clothes / f"run-{kind}",
        model,
        TINY | {"head": "linear"},
        names=names,
        data={"image_size": SIZE, "eval_crop": crop.model_dump(), "root": "."},
        evaluation={"validation": "dataset"},
        precision="fp32",
    )
    _, metrics = evaluate_run(folder)
    assert metrics["validation/top1"] > 0.3
    return folder, metrics["validation/top1"], {key: names[i] for key, i in zip(keys, predicted, strict=True)}


@pytest.mark.parametrize(
    ("kind", "form", "torchvision"),
    [
        ("central", "hf", "present"),
        pytest.param("central", "timm", "present", marks=pytest.mark.slow),
        ("square", "hf", "absent"),
        pytest.param("square", "timm", "present", marks=pytest.mark.slow),
    ],
)
def test_it_predicts_what_evaluate_says(kind, form, torchvision, clothes, tmp_path, capsys, monkeypatch):
    folder, top1, expected = run(clothes, kind)
    export(str(folder), form, tmp_path / form)
    arguments = [form, torchvision, str(clothes / "photos"), printed_lines(capsys)]
    if torchvision == "present":
        monkeypatch.setattr(sys, "argv", ["predict", *arguments])
        exec(PREDICT, {})
        said = capsys.readouterr().out
    else:
        done = subprocess.run([sys.executable, "-c", PREDICT, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said = done.stdout
    found = json.loads(said.splitlines()[-1])
    assert found.keys() == expected.keys()
    agreeing = sum(found[key] == expected[key] for key in found) / len(found)
    right = sum(found[key] == key.partition("/")[0] for key in found) / len(found)
    print(f"{agreeing:.3f} agree, top-1 {right:.4f} of {top1:.4f}")
    assert agreeing >= 0.95
    assert right == pytest.approx(top1, abs=0.02)
