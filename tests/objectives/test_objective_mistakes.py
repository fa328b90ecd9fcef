"""What does not go together in a recipe's objective is refused, and the message names the key and what would do."""

import re

import pytest
from small_recipes import small_recipe

from vitscale.ground.errors import RecipeError
from vitscale.recipe import override

MODEL = {"patch_size": 8, "width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 2}
FIXED = {"position": {"kind": "sincos", "table": "mae"}}
TWO = "{name: global, count: 2}"
KINDS = {  # kind -> blocks of its recipe
    "contrastive": {
        "model": {"name": "ViT-Ti/16", "head": "linear"},
        "data": {"views": [{"name": "global", "count": 2}]},
        "objective": {"group": 8},
        "batch": 16,
    },
    "lejepa": {"model": MODEL, "data": {"views": [{"name": "global", "count": 2}]}},
    "dino": {
        "model": MODEL | {"head": "linear"},
        "data": {"views": [{"name": "first"}, {"name": "second"}, {"name": "local", "count": 3, "size": 16}]},
        "objective": {"group": 4, "prototypes": 24, "ibot": {"prototypes": 20}},
        "averages": [{"name": "ema", "decay": 0.99}],
    },
    "ijepa": {
        "model": MODEL | FIXED | {"pool": "mean"},
        "data": {"image_size": 64},
        "objective": {"predictor_width": 24, "predictor_depth": 2, "predictor_heads": 2},
        "averages": [{"name": "ema", "decay": 0.99}],
    },
    "mae": {"model": MODEL | FIXED, "objective": {"decoder_width": 16, "decoder_depth": 3, "decoder_heads": 4}},
    "masked_patches": {"model": MODEL},
    "classification": {"model": MODEL, "objective": {"keep": 0.5}},
}
MISTAKES = {  # kind -> settings, and a pattern of the message
    "contrastive": [
        ("data.views=[]", r"data\.views"),
        (f"data.views=[{TWO}, {{name: global}}]", "global"),
        (f"data.views=[{TWO}, {{name: local, size: 24}}]", "local.*use 16"),
        (f"data.views=[{TWO}, {{name: local, size: 15}}]", "smaller than one patch"),
        (f"data.views=[{TWO}, {{name: local, size: 16}}]", "model.position={kind: relative}", "leave its size out"),
        (f"data.views=[{TWO}, {{name: local, size: 16}}]", "model={name: Swin-T}", "leave its size out"),
        (f"data.views=[{TWO}, {{name: local, size: 16}}]", "model={name: ResNet50x1}", "leave its size out"),
        ("data.views=[{name: global, size: 16, count: 2}]", "image_size"),
        ("data.flip=0.0", "flip"),
        ("data.dct_scaling=true", "dct_scaling"),
        ("data.bad_samples=mask", "substitute"),
        ("data.views=[{name: a/b, count: 2}]", "name"),
        ("data.views=[{name: global, count: 65}]", "64"),
        ("objective.group=5", "4, or global"),
        ("batch.global=9", "objective.group=2", "use global"),
        ("data.repeats=2", "views"),
        ("data.views=[{name: a, operations: [{kind: gaussian_blur, kernel: 4}]}]", "odd"),
        ("objective.temperature=1e-39", "temperature"),
        ("objective={kind: classification}", r"data\.views"),
        ("objective={kind: masked_patches}", r"data\.views"),
        ("model.num_classes=10", "num_classes"),
    ],
    "lejepa": [("objective.center=[locals]", "locals")],
    "dino": [
        ("data.views=[]", r"data\.views"),
        ("data.views=[{name: global}]", r"data\.views"),
        ("data.views=[{name: first}, {name: second}, {name: local, size: 20}]", "use 16"),
        ("data.image_size=36", "32 or 40"),
        ("data.repeats=2", "repeats"),
        ("data.bad_samples=mask", "substitute"),
        ("objective.group=3", "use 2, or"),
        ("objective.group=1", "group"),
        ("objective.globals=[first, other]", "other"),
        ("objective.globals=[local]", r"data\.image_size"),
        ("objective.ibot.shares=[0.0, 0.01]", "masks no patch"),
        ("objective.ibot.shares=[0.5, 0.1]", "shares"),
        ("objective.ibot.probability=0.05", "probability"),
        (f"objective.prototypes={2**24}", "prototypes"),
        ("objective.teacher_temperature={from: 0, to: 0.07}", "teacher_temperature"),
        ("averages=[]", "averages"),
        ("objective.gram={average: anchor}", "anchor"),
        ("objective.gram={weight: {from: -1, to: 2}}", "weight"),
        ("model.num_classes=10", "num_classes"),
        ("model.position={kind: relative}", "one size"),
        ("batch.global=7", r"batch\.global"),
    ],
    "ijepa": [
        ("objective.area=[0.3, 0.2]", "area"),
        ("objective.predictor_width=25", "predictor_width"),
        ("objective.context=0.001", "context"),
        ("data.image_size=60", "64"),
        ("model.pool=map", "pool"),
        ("averages=[]", "averages"),
    ],
    "mae": [
        ("model.num_classes=5", r"model\.num_classes"),
        ("model.head_bias=1.0", r"model\.head_bias"),
        ("objective.removed=0.99", r"objective\.removed.*0\.5 keeps 8"),
        ("objective.removed=0.01", r"objective\.removed.*0\.5 keeps 8"),
        ("objective.removed=1.0", r"objective\.removed"),
        ("model.patch_size=32", r"objective\.removed.*data\.image_size"),
        ("data.image_size=36", r"data\.image_size 36.*use 32 or 40"),
        ("objective.decoder_heads=5", "decoder_heads, 5; use for example 20"),
        ("objective.decoder_width=18", "objective.decoder_heads=2", "decoder_width 18.*use for example 16"),
        ("objective.decoder_depth=0", r"objective\.decoder_depth"),
        ("model.position={kind: 1d, at: shared, table: big_vision}", r"objective\.kind(.|\n)*model\.position\.at"),
        ("model.position.kind=1d", r"model\.position(.|\n)*table"),
        ("model.patch_size=1", "model.blocks=[1]", r"objective\.kind"),
        ("objective.share=0.5", r"objective\.share"),
        ("schedule.min_lr=0.1", "schedule(.|\n)*min_lr"),
        ("schedule.decay=cosine", "schedule.min_lr=2.0", r"schedule\.min_lr(.|\n)*optimizer\.lr"),
    ],
    "masked_patches": [
        ("model.num_classes=5", r"model\.num_classes"),
        ("model.head_bias=1.0", r"model\.head_bias"),
        ("objective.target=cell_colours", "model.patch_size=10", r"objective\.target"),
        ("objective.share=0.01", r"objective\.share"),
        ("objective.share=0.5", "model.patch_size=32", r"objective\.share"),
        ("objective.target=colour", r"objective\.target"),
        ("objective.loss=softmax", r"objective\.loss"),
        ("model.patch_size=1", "model.blocks=[1]", r"objective\.kind"),
        ("data.normalise.mean=[0.5, 0.5, 0.4]", r"data\.normalise"),
    ],
    "classification": [
        ("model.attention=axial", "model.pool=mean", "model.attention: axial"),
        ("model.position={kind: relative}", "model.position.kind: relative"),
        ("model.position={kind: 1d, at: shared}", "model.position.at: shared"),
        ("model.patch_size=1", "model.blocks=[1]", r"objective\.keep"),
        ("objective.keep=0.01", r"objective\.keep"),
        ("objective.keep=0.0", r"objective\.keep"),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes_name_the_key_and_what_would_do(kind):
    model, blocks = KINDS[kind]["model"], {key: value for key, value in KINDS[kind].items() if key != "model"}
    blocks["objective"] = {"kind": kind} | blocks.get("objective", {})
    recipe = small_recipe(model, **blocks)
    for *settings, told in MISTAKES[kind]:
        with pytest.raises(RecipeError) as caught:
            override(recipe.dump(), settings, "test")
        assert re.search(told, str(caught.value)), (settings, str(caught.value))
