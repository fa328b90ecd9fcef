"""Mistakes in a recipe: each is told at once, with its key, its value and the key that was probably meant."""

from pathlib import Path

import pytest
from messages import assert_messages

from vitscale.ground.errors import RecipeError
from vitscale.recipe import load_recipe

MINIMAL = """
model: {name: ViT-Ti/16}
data: {train: some/where}
batch: {global: 64}
optimizer: {name: adamw, lr: 1e-3}
schedule: {duration: {steps: 10}}
"""
# A setting, and what its message has to name: keys, values and figures.
MISTAKES = [
    ("optimizer.lrr=1", ["optimizer.lrr", "'optimizer.lr'"]),
    ("optimzer.lr=1", ["optimzer", "'optimizer'"]),
    ("lr=3", ["lr", "'optimizer.lr'"]),
    ("optimizer.learning_rate=1", ["'optimizer.lr'"]),
    ("batch_size=1", ["'batch.global'"]),
    ("schedule.epochs=1", ["'schedule.duration.epochs'"]),
    ("base=b16_jft", ["'extends'"]),
    ("a=1", ["a", "anomalies", "selection"]),
    ("objective={kind: mae, loss: null}", ["objective.loss", "mae", "decoder_depth"]),
    ("optimizer={name: sgd, lr: 0.1, betas: [0.9, 0.99]}", ["optimizer.betas", "sgd", "momentum"]),
    ("optimizer.name=adamW", ["optimizer.name: 'adamW'", "'adamw'"]),
    ("batch=64", ["batch: 64", "micro_max"]),
    ("optimizer=adamw", ["{name: adamw}"]),
    ("objective=softmax", ["{kind: softmax}"]),
    ("data=imagenet", ["{train: imagenet}"]),
    ("schedule=cosine", ["{decay: cosine}"]),
    ("model=vit-b/16", ["'vit-b/16'", "'ViT-B/16'"]),
    ("model.position.kind={a: 1}", ["model.position.kind"]),
    ("schedule.duration.epochs=0", ["schedule.duration: 0 epochs"]),
    ("checkpoint.every.steps=0", ["checkpoint.every: 0 steps"]),
    (
        "evaluation.fewshot={tasks: [{name: a, train: b, tst: c}]}",
        ["evaluation.fewshot.tasks.0.tst", "'evaluation.fewshot.tasks.0.test'"],
    ),
    ("optimizer.lr=fast", ["optimizer.lr", "'fast'", "number"]),
    ("optimizer.lr=true", ["optimizer.lr", "True", "number"]),
    ("batch.global=64.5", ["batch.global", "64.5", "integer"]),
    ("optimizer.lr=-1", ["optimizer.lr", "-1", "0"]),
    ("model.name=ViT-X/16", ["ViT-X/16", "'ViT-"]),
    ("model.name=vit-b/16", ["'vit-b/16'", "'ViT-B/16'"]),
    ("model.name=ResNet49x1", ["ResNet49x1", "'ResNet50x1'", "vitscale models"]),
    ("model.name=R50+ViT-B/14", ["R50+ViT-B/14", "'R50+ViT-B/16'"]),
    ("model.num_heads=5", ["192", "num_heads 5"]),
    ("model.variant=v1", ["variant", "ResNet"]),
    ("model={name: ResNet50x1, width: 64}", ["width", "ResNet50x1"]),
    ("model={name: ResNet50x1, pool: cls}", ["pool 'cls'"]),
    ("model={name: ResNet50x1, dropout: 0.1}", ["dropout 0.1", "ResNet"]),
    ("model={name: ResNet50x1, position: {kind: 2d}}", ["position", "ResNet"]),
    ("model={name: null, blocks: []}", ["blocks []"]),
    ("model={name: null, width: 64}", ["patch_size", "ViT-B/16"]),
    ("model={name: null, width_factor: 2}", ["blocks", "ResNet50x1"]),
    ("model={attention: axial, pool: cls}", ["pool: cls", "pool: mean"]),
    ("model.position={kind: relative, at: shared}", ["at: shared", "relative"]),
    ("model={width: 195, position: {kind: 2d}}", ["kind 2d", "width 195"]),
    ("model.position.kind=3d", ["model.position.kind", "'3d'", "relative"]),
    ("model={blocks: [3, 4, 9]}", ["224", "14", "16"]),
    ("schedule.decay=cos", ["schedule.decay", "'cosine'"]),
    ("schedule.boundaries=[{steps: 5}]", ["boundaries", "stairs"]),
    ("schedule.decay=wsd", ["schedule", "wsd", "cooldown"]),
    ("schedule.decay=restarts", ["schedule", "restarts", "cycle"]),
    ("schedule.cooldown.steps=5", ["schedule", "cooldown", "wsd", "rsqrt"]),
    ("schedule.timescale.steps=5", ["schedule", "timescale", "rsqrt"]),
    ("schedule.cycle_factor=2", ["schedule", "cycle_factor", "restarts"]),
    ("schedule.momentum={to: 1}", ["schedule", "momentum.to 1"]),
    ("schedule.weight_decay={to: 0.4}", ["schedule.weight_decay", "optimizer.weight_decay"]),
    ("schedule.duration={steps: 1, epochs: 2}", ["schedule.duration", "steps", "epochs", "examples"]),
    ("optimizer={lr: 1.0, name: null}", ["optimizer", "adamw", "sgd"]),
    ("optimizer.name=lion", ["optimizer", "adamw", "sgd"]),
    ("data.image_size=8", ["data.image_size 8", "patch", "16"]),
    ("data.crop.area=[0.5, 0.1]", ["data.crop", "area"]),
    ("objective={on: 0.1, off: 0.2}", ["objective", "on", "off"]),
    ("parallelism={zero_stage: 3, compile: true}", ["parallelism", "compile", "3"]),
    ("parallelism={compile: false, activation_budget: 0.5}", ["parallelism", "activation_budget", "compile"]),
    ("parallelism.fused_gelu=true", ["parallelism.fused_gelu", "gone", "parallelism.compile"]),
    ("evaluation.inspect={count: 3}", ["evaluation.inspect", "gone", "vitscale inspect"]),
    ("parallelism.zero_stage=4", ["parallelism.zero_stage", "4"]),
    ("parallelism.zero_stage=true", ["parallelism.zero_stage", "True", "integer"]),
    ("optimizer.lr=.inf", ["optimizer.lr", "inf"]),
    ("optimizer.betas=[1.5, 0.9]", ["optimizer.betas.0", "1.5"]),
    ("optimizer.decay_exclude='('", ["optimizer.decay_exclude", "'('"]),
    ("{precision: fp32}", ["KEY=VALUE"]),
    ("parallelism={zero_stage: 9}", ["parallelism.zero_stage", "9"]),
    ("evaluation.every={steps: 5}", ["evaluation.every", "evaluation.validation"]),
    ("selection.metric=validation/top1", ["selection.metric", "validation/top1"]),
    ("noequals", ["noequals", "KEY=VALUE"]),
    ("seed=010", ["seed", "'010'", "integer"]),
    ("seed=1:30", ["seed", "'1:30'", "integer"]),
    ("seed=!!int abc", ["seed", "YAML"]),
    ("schedule.duration.steps=99999999999999999999999999", ["schedule.duration", "9007199254740992"]),
    ("a..b=1", ["a..b", "KEY=VALUE"]),
    ("optimizer.lr=[", ["optimizer.lr", "YAML"]),
]
# A file that is no recipe, and what its message has to name beside the file.
FILES = [
    ("- a\n- b\n", []),
    ("", []),
    ("model: {name: a}\nmodel: {name: b}\n", ["line 2", "'model'"]),
    ("a: [1, 2\n", ["line", "YAML"]),
    ("extends: nothing.yaml\n", ["nothing.yaml"]),
    ("extends: [a]\n", ["extends"]),
    ("1: 2\n", ["1"]),
]


def refused(tmp_path: Path, text: str, *settings: str) -> str:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, settings)
    return str(caught.value)


@pytest.mark.parametrize(("setting", "named"), MISTAKES)
def test_a_mistake_is_one_message_naming_key_value_and_expectation(tmp_path, setting, named):
    message = refused(tmp_path, MINIMAL, setting)
    assert all(name in message for name in named), message


@pytest.mark.parametrize("more", [(), ("model.dropout=0.5",)])
def test_a_model_by_its_name_alone(tmp_path, more):
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL)
    (tmp_path / "short.yaml").write_text(MINIMAL.replace("{name: ViT-Ti/16}", "ViT-Ti/16"))
    (tmp_path / "longer.yaml").write_text("extends: short.yaml\n")
    expected = load_recipe(path, more).dump()
    assert load_recipe(tmp_path / "short.yaml", more).dump() == expected
    assert load_recipe(tmp_path / "longer.yaml", more).dump() == expected
    assert load_recipe(path, ("model=ViT-Ti/16", *more)).dump() == expected


def test_no_word_of_a_file_that_is_no_recipe_is_repeated(tmp_path):
    for text in ("root: x:0:SECRET\nSECRET: 1\n", "SECRET\n", "[SECRET]\n", "1: SECRET\n"):
        (tmp_path / "other").write_text(text)
        assert "SECRET" not in refused(tmp_path, "extends: other\n")


def test_float8_needs_dense_layers_of_blocks_that_are_whole(tmp_path):
    resnet = refused(tmp_path, MINIMAL, "precision=fp8", "model={name: ResNet50x1}")
    assert "precision: fp8" in resnet and "ResNet" in resnet
    divided = refused(tmp_path, MINIMAL, "precision=fp8", "parallelism.zero_stage=3")
    assert "precision: fp8" in divided and "parallelism.zero_stage" in divided


def test_all_mistakes_are_told_at_once(tmp_path):
    message = refused(tmp_path, MINIMAL, "optimizer.lrr=1", "batch.globl=2", "seed=-1")
    assert all(word in message for word in ("optimizer.lrr", "batch.globl", "seed"))


# Each alone is an error of another part, or of two parts together.
ACROSS = {
    "data.image_size=8": "data.image_size 8",
    "precision=fp32": "parallelism.reduce_dtype: bf16",
    "parallelism.reduce_dtype=bf16": "parallelism.reduce_dtype: bf16",
    "selection.metric=validation/top9": "selection.metric 'validation/top9'",
    "selection.mode=max": "selection needs evaluation.every",
    "schedule.momentum={to: 2}": "momentum.to 2",
    "schedule.end_lr=0.5": "end_lr",
    "schedule.decay=cosine": "end_lr",
}


@pytest.mark.parametrize(
    ("broken", "hidden"),
    [
        ([], ["end_lr", "momentum.to 2"]),  # a block's own lines come before what it has to do with others
        (["data.image_size=tall"], ["end_lr", "parallelism.reduce_dtype", "selection.metric"]),
        (["selection.mode=most"], ["end_lr", "parallelism.reduce_dtype", "data.image_size 8"]),
        (["model.patch=9", "logging.evry=1"], ["parallelism.reduce_dtype", "selection.metric", "selection needs"]),
    ],
)
def test_a_part_s_mistakes_hide_none_of_the_others(tmp_path, broken, hidden):
    """And nothing is told of parts together with one that is broken itself."""
    message = refused(tmp_path, MINIMAL, *ACROSS, *broken)
    told = [*hidden, *(setting.partition("=")[0] for setting in broken), "momentum.to 2"]
    assert all(word in message for word in told), message
    assert len(set(message.splitlines())) == len(message.splitlines())
    gone = {"data.image_size=tall": "data.image_size 8", "selection.mode=most": "top9", "model.patch=9": "size 8"}
    assert not any(gone[setting] in message for setting in broken if setting in gone), message


def test_what_parts_say_together_is_told_at_once(tmp_path):
    settings = [setting for setting in ACROSS if not setting.startswith("schedule")]
    message = refused(tmp_path, MINIMAL, *settings)
    assert all(word in message for setting, word in ACROSS.items() if setting in settings), message


@pytest.mark.parametrize(("text", "named"), FILES)
def test_a_file_that_is_no_recipe(tmp_path, text, named):
    message = refused(tmp_path, text)
    assert all(name in message for name in [*named, "r.yaml"]), message


def test_messages(tmp_path):
    said = {setting: refused(tmp_path, MINIMAL, setting) for setting, _ in MISTAKES}
    said |= {f"a file: {text!r}": refused(tmp_path, text) for text, _ in FILES}
    said |= {"all at once": refused(tmp_path, MINIMAL, *ACROSS)}
    assert_messages("recipe", said, {tmp_path: "FOLDER"})
