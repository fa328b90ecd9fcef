"""`vitscale models` as people type it."""

import json

import pytest
from commands import command

from vitscale.recipe.families import REGISTRY


def listed(*arguments: str) -> list[dict]:
    return json.loads(command("models", *arguments, "--format", "json").stdout)


def test_the_whole_registry():
    rows = {row["name"]: row for row in listed()}
    assert tuple(rows) == REGISTRY
    # Parameters as published; MACs by hand.
    macs = 196 * 768**2 + 12 * (197 * 12 * 768**2 + 2 * 197**2 * 768) + 768 * 1000
    assert rows["ViT-B/16"] == {
        **{"name": "ViT-B/16", "family": "vit", "image_size": 224, "tokens": 197, "params": 86_567_656},
        **{"gmacs": macs / 1e9, "accounting_gmacs": macs / 1e9},
    }
    assert (rows["R50+ViT-L/32"]["params"], rows["R50+ViT-L/32"]["tokens"]) == (328_994_856, 50)
    assert rows["Axial-ViT-B/16"]["tokens"] == 196
    resnet = rows["ResNet50x1"]
    assert resnet["params"] == 25_549_352 and resnet["tokens"] is None
    assert 0.95 < resnet["accounting_gmacs"] / resnet["gmacs"] < 0.97
    families = {
        name: rows[name]["family"] for name in ("R50+ViT-L/32", "ResNet50x1", "Axial-ViT-B/16", "AxialResNet50")
    }
    assert list(families.values()) == ["hybrid", "resnet", "axial", "axial"]


def test_the_table_says_what_is_counted_and_what_is_not_seen():
    result = command("models", "ViT-H/14", "ViT-B/16", "R+ViT-Ti/16", "--image-size", "384")
    assert result.returncode == 0 and "GMACs/image" in result.stdout and "padding counted" in result.stdout
    assert "ViT-H/14: 384 x 384 pixels are 27 x 27 patches; 6 pixels right and below are not seen" in result.stdout
    assert result.stdout.count("not seen") == 1
    for name, size, words in (("ViT-B/16", "225", "1 pixel"), ("R+ViT-Ti/16", "228", "1 feature map step")):
        assert f"{words} right and below is not seen" in command("models", name, "--image-size", size).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["vit-h/14"], "did you mean 'ViT-H/14'"),
        (["ViT-B/16", "ResNet51x1"], "did you mean 'ResNet50x1'"),
        ([""], "unknown model ''"),
        (
            ["ViT-B/32", "--image-size", "31"],
            "ViT-B/32 at 31: the image of 31 x 31 is smaller than one patch of 32 x 32",
        ),
        (["R+ViT-Ti/16", "--image-size", "28"], "the feature map of 7 x 7 is smaller than one patch of 8 x 8"),
        (["--image-size", "0"], "image-size"),
        (["--num-classes", "0"], "num-classes"),
        (["--format", "yaml"], "format"),
    ],
)
def test_mistakes_are_one_message(arguments, words):
    result = command("models", *arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert words in result.stderr
