"""The recipes of the paper's grid against its Table 3, appendices B.1 and D, written out once more."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from timm.data import IMAGENET_DEFAULT_MEAN

from vitscale.about.studies.expansion import expand
from vitscale.about.studies.reading import load_study
from vitscale.flops import recipe_work
from vitscale.models import build_model
from vitscale.objectives import build_objective
from vitscale.recipe import group_of, is_frozen, load_recipe, override, recipes_dir

# Table 3: recipe -> model, epochs, base learning rate. All of JFT: linear decay, weight decay 0.1, no dropout.
JFT = {
    "b32_jft": ("ViT-B/32", 7, 8e-4),
    "b16_jft": ("ViT-B/16", 7, 8e-4),
    "l32_jft": ("ViT-L/32", 7, 6e-4),
    "l16_jft": ("ViT-L/16", 7, 4e-4),
    "l16_jft_14ep": ("ViT-L/16", 14, 4e-4),
    "h14_jft": ("ViT-H/14", 14, 3e-4),
    "r50x1_jft": ("ResNet50x1", 7, 1e-3),
    "r50x2_jft": ("ResNet50x2", 7, 1e-3),
    "r101x1_jft": ("ResNet101x1", 7, 8e-4),
    "r152x1_jft": ("ResNet152x1", 7, 6e-4),
    "r152x2_jft": ("ResNet152x2", 7, 6e-4),
    "r152x2_jft_14ep": ("ResNet152x2", 14, 6e-4),  # Table 3 has no row for it, nor for the next: ours
    "r200x3_jft": ("ResNet200x3", 14, 6e-4),
    "r50_b32_jft": ("R50+ViT-B/32", 7, 8e-4),
    "r50_b16_jft": ("R50+ViT-B/16", 7, 8e-4),
    "r50_l32_jft": ("R50+ViT-L/32", 7, 2e-4),
    "r50_l16_jft": ("R50+ViT-L/16", 7, 4e-4),
    "r50_l16_jft_14ep": ("R50+ViT-L/16", 14, 4e-4),
}
I21K = {"b16_i21k": 90, "b32_i21k": 90, "l16_i21k": 30, "l16_i21k_90ep": 90, "l32_i21k": 30, "l32_i21k_90ep": 90}
I1K = ("b16_i1k", "b32_i1k", "l16_i1k", "l32_i1k")
FIGURE_4 = {
    "bhalf32": ("ViT-b/32", 8e-4),
    "b32": ("ViT-B/32", 8e-4),
    "l32": ("ViT-L/32", 6e-4),
    "l16": ("ViT-L/16", 4e-4),
    "r50x1": ("ResNet50x1", 1e-3),
    "r152x2": ("ResNet152x2", 6e-4),
}
# Table 8: what b16_... is called -> kind and place of its position embeddings.
TABLE_8 = {
    "nopos": ("none", "stem"),
    "pos1d": ("1d", "stem"),
    "pos1d_every": ("1d", "every_layer"),
    "pos1d_shared": ("1d", "shared"),
    "pos2d": ("2d", "stem"),
    "pos2d_every": ("2d", "every_layer"),
    "pos2d_shared": ("2d", "shared"),
    "relpos": ("relative", "stem"),
}


# What came after the paper.
# AugReg: the file of the weights -> the recipe.
AUGREG = {
    "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0": "augreg_ti16_i21k",
    "S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0": "augreg_s32_i21k",
    "S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0": "augreg_s16_i21k",
    "B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0": "augreg_b32_i21k",
    "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0": "augreg_b16_i21k",
    "L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0": "augreg_l16_i21k",
    "R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0": "augreg_r_ti16_i21k",
    "R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0": "augreg_r26_s32_i21k",
    "R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1": "augreg_r50_l32_i21k",
}
# On ImageNet: the two published as timm's augreg_in1k, and levels of big_vision's configs/vit_i1k.py.
AUGREG_I1K = {
    "Ti_16-i1k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0": "augreg_ti16_i1k",
    "S_16-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0": "augreg_s16_i1k",
    "B_16-i1k-300ep-lr_0.001-aug_strong2-wd_0.1-do_0.1-sd_0.1": "augreg_b16_i1k",
    "L_16-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0": "augreg_l16_i1k",
}
# Magnitude of RandAugment, alpha of mixup, of the levels of AugReg, in order.
LEVELS = {
    **{"none": (None, None), "light1": (0, None), "light2": (10, 0.2), "medium1": (15, 0.2)},
    **{"medium2": (15, 0.5), "strong1": (20, 0.5), "strong2": (20, 0.8)},
}
# DeiT-III: the recipe -> side of its images, learning rate, drop-path, parameters in millions (README_revenge.md).
DEIT3 = {
    "deit3_s16_i1k": (224, 4e-3, 0.05, 22.0),
    "deit3_b16_i1k": (192, 3e-3, 0.2, 86.6),
    "deit3_l16_i1k": (192, 3e-3, 0.45, 304.4),
    "deit3_h14_i1k": (160, 3e-3, 0.6, 632.1),
}
# ViT-5: the recipe -> side, learning rate, drop-path, epochs, parameters in millions (its README, 11 February 2026).
VIT5 = {
    "vit5_s16_i1k": (224, 4e-3, 0.05, 800, 22),
    "vit5_b16_i1k": (192, 3e-3, 0.2, 800, 87),
    "vit5_l16_i1k": (192, 3e-3, 0.35, 400, 304),
}
# Swin: the recipe -> model, drop-path, epochs, of which for the warmup, global batch, parameters in millions (Table 1).
SWIN = {
    "swin_t_i1k": ("Swin-T", 0.2, 300, 20, 1024, 28.3),
    "swin_s_i1k": ("Swin-S", 0.3, 300, 20, 1024, 49.6),
    "swin_b_i1k": ("Swin-B", 0.5, 300, 20, 1024, 87.8),
    "swin_b_i21k": ("Swin-B", 0.2, 90, 5, 4096, 87.8),
}
# The last 20 epochs at 224 pixels: the recipe -> drop-path.
LAST_EPOCHS = {
    **{"deit3_b16": 0.2, "deit3_l16": 0.45, "deit3_h14": 0.55},
    **{"vit5_s16": 0.05, "vit5_b16": 0.25, "vit5_l16": 0.5},
}
# MAE: the recipe -> of its fine-tuning the learning rate, epochs, layer decay, drop-path (FINETUNE.md, batch 1024).
MAE = {
    "mae_b16_i1k": (2e-3, 100, 0.65, 0.1),
    "mae_l16_i1k": (4e-3, 50, 0.75, 0.2),
    "mae_h14_i1k": (4e-3, 50, 0.75, 0.3),
}
# Continued from released weights: the recipe -> model, drop-path.
CONTINUED = {
    f"continue_dinov{version}_{size}{patch}": (f"DINOv{version}-{size.upper()}/{patch}", drop_path)
    for version, patch in ((2, 14), (3, 16))
    for size, drop_path in (("s", 0.1), ("b", 0.1), ("l", 0.2))
}
LATER = (
    *("s16_i1k_90ep", "s16_i1k_300ep", "deit_ti16_i1k", "deit_s16_i1k", "deit_b16_i1k"),
    *("deit_ti16_distilled_i1k", "deit_s16_distilled_i1k", "deit_b16_distilled_i1k"),
    *(*AUGREG.values(), *AUGREG_I1K.values(), *DEIT3, *VIT5, *SWIN),
)


def check_adam(recipe, lr, weight_decay, clip=None):
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("adamw", lr, weight_decay)
    assert (optimizer.betas, optimizer.eps, optimizer.clip_norm) == ([0.9, 0.999], 1e-8, clip)
    assert optimizer.decay_exclude is None


def check_shared(recipe, decay="linear"):
    assert recipe.batch.global_size == 4096 and recipe.data.image_size == 224
    assert recipe.objective.loss == "sigmoid" and recipe.model.head == "pretrain" and recipe.model.head_bias is None
    assert (recipe.schedule.warmup.steps, recipe.schedule.decay, recipe.schedule.end_lr) == (10_000, decay, 1e-5)
    assert (recipe.data.crop.area, recipe.data.crop.aspect) == ([0.05, 1.0], [3 / 4, 4 / 3])
    assert recipe.data.flip == 0.5


def check_jft(recipe, lr, dropout=0.0):
    check_shared(recipe)
    check_adam(recipe, lr, 0.1)
    assert recipe.dump()["model"]["dropout"] == dropout and recipe.model.num_classes == 18_291
    assert (recipe.objective.on, recipe.objective.off) == (1.0, 0.0)


@pytest.mark.parametrize("stem", JFT)
def test_the_scaling_study(stem):
    model, epochs, lr = JFT[stem]
    recipe = load_recipe(stem)
    check_jft(recipe, lr)
    assert (recipe.model.name, recipe.schedule.duration.epochs) == (model, epochs)
    assert recipe.data.train == "jft300m/train"


@pytest.mark.parametrize("stem", I21K)
def test_imagenet21k(stem):
    recipe = load_recipe(stem)
    check_shared(recipe)
    check_adam(recipe, 1e-3, 0.03)
    assert recipe.model.name == f"ViT-{stem[0].upper()}/{stem[1:3]}" and recipe.schedule.duration.epochs == I21K[stem]
    assert (recipe.model.dropout, recipe.model.num_classes) == (0.1, 21_843)
    assert (recipe.objective.on, recipe.objective.off) == (0.9999, 0.0001)


@pytest.mark.parametrize("stem", I1K)
def test_imagenet(stem):
    recipe = load_recipe(stem)
    check_shared(recipe, decay="cosine")
    check_adam(recipe, 3e-3, 0.3, clip=1.0)
    assert recipe.model.name == f"ViT-{stem[0].upper()}/{stem[1:3]}" and recipe.schedule.duration.epochs == 300
    assert (recipe.model.dropout, recipe.model.num_classes) == (0.1, 1000)
    assert (recipe.objective.on, recipe.objective.off) == (1.0, 0.0)


@pytest.mark.parametrize("size", ["9m", "30m", "90m", "300m"])
@pytest.mark.parametrize("short", FIGURE_4)
def test_sizes_of_the_data_set(short, size):
    model, lr = FIGURE_4[short]
    recipe = load_recipe(f"{short}_jft{size}")
    check_jft(recipe, lr)
    assert recipe.model.name == model
    assert recipe.data.train == ("jft300m/train" if size == "300m" else f"jft300m/train-{size}")
    assert recipe.schedule.duration.steps == 7 * (303_000_000 // 4096), "as many images whatever the size"
    assert recipe.selection.metric == "validation/top1" and recipe.selection.patience is not None
    assert [task.name for task in recipe.evaluation.fewshot.tasks] == ["imagenet"]


@pytest.mark.parametrize("short", TABLE_8)
def test_position_embeddings(short):
    recipe = load_recipe(f"b16_{short}_jft")
    check_jft(recipe, 8e-4)
    assert recipe.model.name == "ViT-B/16" and recipe.schedule.duration.epochs == 7
    assert (recipe.model.position.kind, recipe.model.position.at) == TABLE_8[short]
    assert 5 in recipe.evaluation.fewshot.shots


def test_the_shape_study_varies_one_thing_at_a_time():
    base = load_recipe("shape_base_jft")
    check_jft(base, 6e-4)
    base_shape = base.model.shape()
    assert (base_shape.depth, base_shape.width, base_shape.mlp_dim, base_shape.patch_size) == (8, 1024, 2048, 32)
    keys = {"depth": "depth", "width": "width", "mlp": "mlp_dim", "patch": "patch_size"}
    seen = set()
    for file in recipes_dir().glob("shape_*_jft.yaml"):
        recipe = load_recipe(file)
        check_jft(recipe, 6e-4)
        shape, what = recipe.model.shape(), file.stem.removeprefix("shape_").removesuffix("_jft")
        assert shape.width // shape.num_heads == 64
        changed = {key for key in keys.values() if getattr(shape, key) != getattr(base_shape, key)}
        kind = what.rstrip("0123456789")
        if kind in keys:
            assert changed == {keys[kind]} and getattr(shape, keys[kind]) == int(what.removeprefix(kind))
        elif what != "base":
            assert changed == {"depth", "width", "mlp_dim"}
        seen.add(kind)
    assert seen == {*keys, "base", "all_half", "all_double"} and load_recipe("shape_depth64_jft").model.depth == 64


@pytest.mark.parametrize("stem", ["r50x1_sgd_jft", "r152x2_sgd_jft"])
def test_sgd_is_bit_s(stem):
    """Kolesnikov et al. (2020): 0.03 * batch / 256, momentum 0.9, weight decay 1e-4, 40 epochs in stairs."""
    recipe, adam = load_recipe(stem), load_recipe(stem.replace("_sgd", ""))
    assert recipe.model == adam.model and recipe.schedule.duration == adam.schedule.duration
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.9, 1e-4)
    assert optimizer.lr == pytest.approx(0.03 * 4096 / 256)
    stairs = [boundary.epochs * 40 / 7 for boundary in recipe.schedule.boundaries]
    assert stairs == pytest.approx([10, 23, 30, 37]) and recipe.schedule.warmup.steps == 5_000


@pytest.mark.parametrize(
    ("stem", "model", "lr"),
    [
        ("axial_b32_jft", "Axial-ViT-B/32", 8e-4),
        ("axial_b16_jft", "Axial-ViT-B/16", 8e-4),
        ("axial_r50_jft", "AxialResNet50", 1e-3),
    ],
)
def test_axial_models(stem, model, lr):
    recipe = load_recipe(stem)
    check_jft(recipe, lr)
    assert recipe.model.name == model and 5 in recipe.evaluation.fewshot.shots


@pytest.mark.parametrize(
    ("stem", "target", "share"),
    [
        ("b16_jft_masked", "mean_colour", 0.5),
        ("b16_jft_masked_cells", "cell_colours", 0.5),
        ("b16_jft_masked_pixels", "pixels", 0.5),
        ("b16_jft_masked_15pct", "mean_colour", 0.15),
        ("b16_i21k_masked", "mean_colour", 0.5),
    ],
)
def test_masked_patch_prediction(stem, target, share):
    """Appendix B.1.2: Adam at 2e-4, 10,000 steps of warmup, cosine, a million steps of 4,096 images."""
    recipe = load_recipe(stem)
    check_adam(recipe, 2e-4, 0.1)
    assert (recipe.objective.kind, recipe.objective.target, recipe.objective.share) == ("masked_patches", target, share)
    assert recipe.schedule.warmup.steps == 10_000 and recipe.schedule.decay == "cosine"
    assert recipe.schedule.duration.steps == (100_000 if "i21k" in stem else 1_000_000)
    assert recipe.batch.global_size == 4096 and recipe.model.name == "ViT-B/16" and recipe.model.dropout == 0


# Table 4, and by the authors' code warmup and crops: recipe -> steps, warmup, resolution, model, dropout.
TABLE_4 = {
    "imagenet": (20_000, 500, 384, "ViT-B/16", 0.0),
    "imagenet_512": (20_000, 500, 512, "ViT-L/16", 0.1),  # Table 2
    "imagenet_518": (20_000, 500, 518, "ViT-H/14", 0.1),
    "cifar10": (10_000, 500, 384, "ViT-B/16", 0.0),
    "cifar100": (10_000, 500, 384, "ViT-B/16", 0.0),
    "pets": (500, 50, 384, "ViT-B/16", 0.0),
    "flowers": (500, 50, 384, "ViT-B/16", 0.0),
    "vtab": (2_500, 250, 384, "ViT-B/16", 0.0),
}
# BiT-HyperRule: resolution, side of the square that is cropped, steps, warmup, and where the rate falls.
SMALL, MEDIUM, LARGE = (
    (500, 100, [200, 300, 400]),
    (10_000, 500, [3000, 6000, 9000]),
    (20_000, 500, [6000, 12000, 18000]),
)
HYPERRULE = {
    "bit_imagenet": (480, 512, *LARGE),
    "bit_cifar10": (128, 160, *MEDIUM),
    "bit_cifar100": (128, 160, *MEDIUM),
    "bit_pets": (480, 512, *SMALL),
    "bit_flowers": (480, 512, *SMALL),
}


def check_fine_tuning(recipe, steps, warmup, image_size):
    optimizer, schedule, data = recipe.optimizer, recipe.schedule, recipe.data
    assert (optimizer.name, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.9, 0.0)
    assert recipe.batch.global_size == 512 and recipe.objective.loss == "softmax"
    assert (schedule.duration.steps, schedule.warmup.steps) == (steps, warmup)
    assert data.image_size == image_size and (data.eval_crop.kind, data.eval_crop.fraction) == ("square", 1.0)
    assert recipe.init is not None and (recipe.init.head, recipe.init.positions) == ("zero", "resample")
    assert recipe.model.head == "linear" and recipe.model.num_classes is None
    # The test set is looked at once, at the end.
    assert recipe.evaluation.every is None and recipe.selection is None


@pytest.mark.parametrize("name", TABLE_4)
def test_fine_tuning_is_table_4_s(name):
    steps, warmup, image_size, model, dropout = TABLE_4[name]
    recipe = load_recipe(f"finetune/{name}")
    check_fine_tuning(recipe, steps, warmup, image_size)
    assert (recipe.optimizer.clip_norm, recipe.optimizer.momentum_dtype) == (1.0, "bf16")
    assert recipe.schedule.decay == "cosine" and recipe.optimizer.lr == (0.01 if name == "vtab" else 0.03)
    assert (recipe.model.name, recipe.model.dropout) == (model, dropout)
    if "_5" in name:
        assert recipe.ema is not None and (recipe.ema.decay, recipe.ema.warmup) == (0.9999, True)
    else:
        assert recipe.ema is None
    crop = recipe.data.crop
    if name == "vtab":
        assert (crop.kind, crop.fraction) == ("resize", 480 / 512)
    else:
        assert (crop.kind, crop.area, crop.aspect, recipe.data.flip) == ("inception", [0.05, 1.0], [3 / 4, 4 / 3], 0.5)


@pytest.mark.parametrize("name", HYPERRULE)
def test_fine_tuning_of_resnets_is_bit_s(name):
    image_size, square, steps, warmup, boundaries = HYPERRULE[name]
    recipe = load_recipe(f"finetune/{name}")
    check_fine_tuning(recipe, steps, warmup, image_size)
    assert recipe.optimizer.lr == 0.003 and recipe.optimizer.clip_norm is None
    assert recipe.schedule.decay == "stairs" and recipe.schedule.factor == 0.1
    assert [boundary.steps for boundary in recipe.schedule.boundaries] == boundaries
    assert (recipe.data.crop.kind, recipe.data.crop.fraction) == ("resize", image_size / square)
    mixing = recipe.objective.mixing  # of tasks of 20,000 examples and more
    assert mixing is None if steps == 500 else (mixing.mixup, mixing.cutmix, mixing.per) == (0.1, 0, "batch")


def test_no_recipe_of_the_paper_is_left_out():
    known = {*JFT, *I21K, *I1K, "r50x1_sgd_jft", "r152x2_sgd_jft", "axial_b32_jft", "axial_b16_jft", "axial_r50_jft"}
    known |= {f"{short}_jft{size}" for short in FIGURE_4 for size in ("9m", "30m", "90m", "300m")}
    known |= {f"b16_{short}_jft" for short in TABLE_8}
    known |= {"b16_i21k_masked", *(f"b16_jft_masked{ablation}" for ablation in ("", "_cells", "_pixels", "_15pct"))}
    others = {path.stem for path in recipes_dir().glob("*.yaml")} - known
    own = {"demo", "vit4_cifar10", "beit_b16_i1k", "continue_mae_b16", "simclr_s16_i1k", "lejepa_l14_i1k"}
    others = {stem for stem in others if not stem.startswith("shape_")}
    assert others == {*own, *CONTINUED, *LATER, *MAE, *TAUGHT}
    assert {path.stem for path in recipes_dir().glob("finetune/*.yaml")} == {
        *(*TABLE_4, *HYPERRULE, *LAST_EPOCHS, *MAE, "swin_b_384")
    }


@pytest.mark.parametrize("epochs", [90, 300])
def test_better_plain_baselines(epochs):
    """Beyer et al. (2022) by big_vision's configs/vit_s16_i1k.py; its weight decay is not multiplied by the rate."""
    recipe = load_recipe(f"s16_i1k_{epochs}ep")
    assert (recipe.model.name, recipe.model.pool, recipe.model.head) == ("ViT-S/16", "mean", "pretrain")
    assert recipe.model.position.kind == "sincos" and recipe.model.dropout == recipe.model.drop_path == 0
    assert (recipe.batch.global_size, recipe.schedule.duration.epochs) == (1024, epochs)
    assert (recipe.schedule.warmup.steps, recipe.schedule.decay) == (10_000, "cosine")
    optimizer = recipe.optimizer
    assert (optimizer.lr, optimizer.weight_decay * optimizer.lr, optimizer.clip_norm) == (1e-3, pytest.approx(1e-4), 1)
    (augmentation,) = recipe.data.operations
    assert (augmentation.set, augmentation.n, augmentation.m) == ("big_vision", 2, 10)
    mixing = recipe.objective.mixing
    assert (recipe.objective.loss, recipe.objective.label_smoothing) == ("softmax", 0)
    assert (mixing.mixup, mixing.cutmix, mixing.probability, mixing.per) == (0.2, 0, 1, "batch")


def decayed_of(recipe, build):
    """Parameters by name, and the names of those with weight decay."""
    with torch.device("meta"):
        built = build(recipe, 1000)
    weights = dict(built.named_parameters() if build is build_model else built.named_weights())
    return weights, {name for name in weights if not re.search(recipe.optimizer.decay_exclude, name)}


def check_mixing_of_deit(recipe):
    mixing = recipe.objective.mixing
    assert (mixing.mixup, mixing.cutmix, mixing.cutmix_share, mixing.per) == (0.8, 1, 0.5, "batch")


def check_augmentation_of_deit(recipe, erases=True):
    check_mixing_of_deit(recipe)
    augmentation, *others = recipe.data.operations
    assert (recipe.objective.loss, recipe.objective.label_smoothing) == ("softmax", 0.1)
    assert (augmentation.set, augmentation.n, augmentation.m, augmentation.std) == ("timm_increasing", 2, 9, 0.5)
    found = [(each.kind, each.probability, each.mode) for each in others]
    assert found == ([("random_erasing", 0.25, "pixel")] if erases else [])


@pytest.mark.parametrize(
    ("size", "params"),
    [
        *(("ti16", 5_717_416), ("s16", 22_050_664), ("b16", 86_567_656)),
        *(("ti16_distilled", 5_910_800), ("s16_distilled", 22_436_432), ("b16_distilled", 87_338_192)),
    ],
)
def test_deit(size, params):
    """Touvron et al. (2021) by the defaults of their main.py; parameters are those of their models."""
    recipe = load_recipe(f"deit_{size}_i1k")
    assert recipe.objective.kind == ("distillation" if "distilled" in size else "classification")
    assert recipe_work(recipe, 1000).params == params
    assert (recipe.model.drop_path, recipe.model.dropout, recipe.data.repeats) == (0.1, 0, 3)
    assert (recipe.batch.global_size, recipe.schedule.duration.epochs, recipe.schedule.warmup.epochs) == (1024, 300, 5)
    optimizer = recipe.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.clip_norm) == (5e-4 * 1024 / 512, 0.05, None)
    check_augmentation_of_deit(recipe)
    assert recipe.data.crop.area == [0.08, 1]


@pytest.mark.parametrize("file", [*AUGREG, *AUGREG_I1K])
def test_augreg(file):
    """The published weights are called by the settings that they were trained with."""
    name, settings = file.split("-", 1)
    is_i1k = settings.startswith("i1k")
    recipe = load_recipe((AUGREG_I1K if is_i1k else AUGREG)[file])
    said = dict(part.split("_") for part in settings.split("-")[2:])
    *stem, size, patch = name.split("_")
    assert recipe.model.name == f"{''.join(f'{part}+' for part in stem)}ViT-{size}/{patch}"
    expected = ("pretrain", -6.9, 1000, "sigmoid") if is_i1k else ("linear", -10, 21_843, "sigmoid")
    model = recipe.model
    assert (model.head, model.head_bias, model.num_classes, recipe.objective.loss) == expected
    assert (recipe.model.dropout, recipe.model.drop_path) == (float(said["do"]), float(said["sd"]))
    check_adam_of_later(recipe, float(said["lr"]), float(said["wd"]))
    assert (recipe.batch.global_size, recipe.schedule.duration.epochs) == (4096, 300)
    assert (recipe.schedule.warmup.steps, recipe.schedule.decay) == (10_000, "cosine")
    assert level_of(recipe) == LEVELS[said["aug"]]


def level_of(recipe):
    """(magnitude of RandAugment, alpha of mixup), as `LEVELS` has them."""
    mixing = recipe.objective.mixing
    if not recipe.data.operations:
        return None, mixing
    (augmentation,) = recipe.data.operations
    assert (augmentation.set, augmentation.n) == ("big_vision", 2)
    return augmentation.m, None if mixing is None else mixing.mixup


def test_all_levels_of_augreg_are_a_study():
    entries = expand(load_study("augreg_levels"), Path("runs")).entries
    assert len(entries) == 56
    for data, size in itertools.product(("i1k", "i21k"), ("ti16", "s16", "b16", "l16")):
        runs = [entry.options[0].recipe for name, entry in entries.items() if f"-augreg_{size}_{data}-" in name]
        assert [level_of(recipe) for recipe in runs] == list(LEVELS.values())
        assert {recipe.model.drop_path for recipe in runs} == {recipe.model.dropout for recipe in runs} == {0}


def check_deit3(recipe, drop_path):
    model, data = recipe.model, recipe.data
    assert [recipe.model.drop_path_rule, recipe.model.drop_path] == ["uniform", drop_path]
    assert (model.layer_scale, model.class_position, model.mlp, model.head) == (1e-4, False, "exact_gelu", "linear")
    assert (data.crop.area, data.normalise.mean) == ([0.08, 1], list(IMAGENET_DEFAULT_MEAN))
    check_mixing_of_deit(recipe)
    assert recipe.schedule.warmup.epochs == 5 and recipe.schedule.decay == "cosine"


@pytest.mark.parametrize("stem", DEIT3)
def test_deit3(stem):
    """Touvron et al. (2022) by the commands of README_revenge.md; parameters are those of its table, at 224 pixels."""
    side, lr, drop_path, params = DEIT3[stem]
    recipe = load_recipe(stem)
    check_deit3(recipe, drop_path)
    at_224 = override(recipe.dump(), ["data.image_size=224"], stem)
    assert recipe_work(at_224, 1000).params / 1e6 == pytest.approx(params, abs=0.06)
    assert (recipe.data.image_size, recipe.data.repeats, recipe.schedule.duration.epochs) == (side, 3, 800)
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay, optimizer.clip_norm) == ("lamb", lr, 0.05, 1)
    assert (optimizer.betas, optimizer.eps) == ([0.9, 0.999], 1e-8)  # their --opt-eps, which FusedLAMB is given
    assert recipe.batch.global_size == 2048
    assert (recipe.objective.loss, recipe.objective.threshold, recipe.objective.label_smoothing) == ("bce", 0, 0)
    assert [(each.kind, each.jitter) for each in recipe.data.operations] == [("three_augment", 0.3)]


@pytest.mark.parametrize("stem", VIT5)
def test_vit5(stem):
    """Wang et al. (2026) by the commands of their README, which are DeiT-III's but for these numbers."""
    side, lr, drop_path, epochs, params = VIT5[stem]
    recipe, deit3 = load_recipe(stem), load_recipe(stem.replace("vit5", "deit3"))
    check_deit3(recipe, drop_path)
    for block in ("data", "batch", "objective"):
        assert getattr(recipe, block) == getattr(deit3, block)
    assert (recipe.data.image_size, recipe.optimizer.lr, recipe.schedule.duration.epochs) == (side, lr, epochs)
    assert recipe.optimizer.model_copy(update={"decay_exclude": None}) == deit3.optimizer.model_copy(
        update={"decay_exclude": None}
    )
    assert recipe_work(recipe, 1000).params / 1e6 == pytest.approx(params, abs=0.6)
    check_model_of_vit5(recipe.model)


def check_model_of_vit5(model):
    """As in their models_vit5.py."""
    assert (model.norm, model.qk_norm, model.qkv_bias, model.registers) == ("rms", True, "none", 4)
    position = model.position
    assert (position.kind, position.unit, position.base, position.registers_base) == ("1d_rope", "patch", 10_000, 100)


@pytest.mark.parametrize("stem", LAST_EPOCHS)
def test_the_last_epochs_of_deit3_and_vit5(stem):
    recipe = load_recipe(f"finetune/{stem}")
    check_deit3(recipe, LAST_EPOCHS[stem])
    if stem.startswith("vit5"):
        check_model_of_vit5(recipe.model)
    assert (recipe.model.name, recipe.init.head) == (load_recipe(f"{stem}_i1k").model.name, "keep")
    assert (recipe.data.image_size, recipe.data.repeats, recipe.schedule.duration.epochs) == (224, 1, 20)
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay, optimizer.clip_norm) == ("adamw", 1e-5, 0.1, None)
    assert recipe.batch.global_size == 512
    check_augmentation_of_deit(recipe, erases=False)


def check_mae(recipe, stem):
    """The model of both: vit_*_patch16 and mae_vit_*_patch16 of He et al.'s code."""
    size, patch = stem.split("_")[1][0], stem.split("_")[1][1:]
    assert (recipe.model.name, recipe.model.mlp) == (f"ViT-{size.upper()}/{patch}", "exact_gelu")
    assert (recipe.model.position.kind, recipe.model.position.table) == ("sincos", "mae")
    assert (recipe.data.image_size, recipe.data.normalise.mean) == (224, list(IMAGENET_DEFAULT_MEAN))


@pytest.mark.parametrize("stem", MAE)
def test_mae(stem):
    """He et al. (2022) by the command of PRETRAIN.md and the defaults of main_pretrain.py, models_mae.py."""
    recipe = load_recipe(stem)
    check_mae(recipe, stem)
    objective, optimizer = recipe.objective, recipe.optimizer
    assert (objective.kind, objective.removed, objective.norm_pix) == ("mae", 0.75, True)
    assert (objective.decoder_width, objective.decoder_depth, objective.decoder_heads) == (512, 8, 16)
    assert objective.kept(recipe.context) == (64 if "14" in stem else 49)
    assert (optimizer.name, optimizer.betas, optimizer.weight_decay) == ("adamw", [0.9, 0.95], 0.05)
    assert optimizer.lr == pytest.approx(1.5e-4 * 4096 / 256) and optimizer.clip_norm is None
    schedule = recipe.schedule
    assert (recipe.batch.global_size, schedule.duration.epochs, schedule.warmup.epochs) == (4096, 1600, 40)
    assert (recipe.schedule.decay, recipe.schedule.min_lr, recipe.data.crop.area) == ("cosine", 0, [0.2, 1])
    weights, decayed = decayed_of(recipe, build_objective)
    assert decayed == {name for name, each in weights.items() if each.ndim > 1}  # timm 0.3.2's rule


def test_beit():
    """Bao et al. (2022) by the command for ImageNet-1k of beit/README.md and run_beit_pretraining.py's defaults."""
    recipe = load_recipe("beit_b16_i1k")
    objective, optimizer, schedule = recipe.objective, recipe.optimizer, recipe.schedule
    assert (objective.masks, objective.counts(recipe.context)) == ("blocks", (75, 0, 0))
    targets = objective.targets
    assert (targets.path, targets.vocabulary, targets.image_size) == ("transformers:FlavaImageCodebook", 8192, 112)
    for mean, std in zip(targets.normalise.mean, targets.normalise.std, strict=True):
        assert [(x - mean) / std for x in (0.0, 1.0)] == pytest.approx([0.1, 0.9])  # map_pixels of openai/DALL-E
    assert (recipe.model.name, recipe.model.layer_scale, recipe.model.drop_path) == ("ViT-B/16", 0.1, 0.1)
    assert (recipe.model.mlp, recipe.model.qkv_bias) == ("exact_gelu", "no_key")
    assert (optimizer.lr, optimizer.betas) == (1.5e-3, [0.9, 0.999])
    assert (optimizer.weight_decay, optimizer.clip_norm) == (0.05, 3)
    assert (recipe.batch.global_size, schedule.duration.epochs, schedule.warmup.epochs) == (2048, 800, 10)
    assert (schedule.decay, schedule.min_lr, recipe.data.crop.area) == ("cosine", 1e-5, [0.08, 1])
    (jitter,) = recipe.data.operations
    assert (jitter.brightness, jitter.contrast, jitter.saturation) == (0.4, 0.4, 0.4)
    assert (jitter.hue, jitter.probability) == (0, 1)
    weights, decayed = decayed_of(recipe, build_objective)
    assert decayed == {name for name, each in weights.items() if each.ndim > 1} - {"cls", "pos_embedding"}


def test_mae_continued():
    """The rate of pre-training after a longer warmup, watched from before the first update on."""
    recipe, before = load_recipe("continue_mae_b16"), load_recipe("mae_b16_i1k")
    assert (recipe.model, recipe.objective, recipe.data.crop) == (before.model, before.objective, before.data.crop)
    assert recipe.optimizer.lr == pytest.approx(1.5e-4 * recipe.batch.global_size / 256)
    assert recipe.optimizer.betas == before.optimizer.betas and recipe.schedule.warmup.steps == 5000
    evaluation = recipe.evaluation
    assert recipe.measured_on(recipe.selection.metric)[0] == evaluation.knn.test == "photos/test"
    assert evaluation.at_start


@pytest.mark.parametrize("stem", CONTINUED)
def test_dino_continued(stem):
    """Heads learn alone at first: no parameter of the model moves before step 2,500."""
    model, drop_path = CONTINUED[stem]
    recipe = load_recipe(stem)
    assert (recipe.model.name, recipe.model.drop_path) == (model, drop_path)
    optimizer, schedule = recipe.optimizer, recipe.schedule
    with torch.device("meta"):
        names = [name for name, _ in build_objective(recipe, 0).named_weights()]
    begins = {name: group_of(optimizer, name).begin.steps for name in names}
    assert {begins[name] for name in names if not recipe.objective.owns(name)} == {2500}
    assert {name for name in names if begins[name] == 1250} == {name for name in names if ".last." in name} != set()
    assert {begins[name] for name in names if recipe.objective.owns(name) and ".last." not in name} == {0}
    assert 2e-5 <= optimizer.lr / (recipe.batch.global_size / 1024) ** 0.5 <= 1e-4
    assert schedule.weight_decay is None and schedule.warmup.steps == 2500 + 5000
    (average,) = recipe.averages
    assert (average.decay, average.to, recipe.objective.koleo) == (0.999, None, 0.1)
    assert recipe.objective.teacher_temperature.over.steps * 5 == schedule.duration.steps
    heads = (recipe.objective.ibot.prototypes, recipe.objective.prototypes)
    assert heads == (16384 if "v3" in stem else None, 16384)
    # It cannot end before the warmup does.
    assert recipe.selection.patience * recipe.evaluation.every.steps > schedule.warmup.steps
    assert recipe.evaluation.at_start and 2500 % recipe.evaluation.every.steps == 0
    assert all(side % model_patch(recipe) == 0 for _, side in recipe.data.training_views())


def model_patch(recipe):
    return recipe.model.patches(recipe.data.image_size).size


@pytest.mark.parametrize("stem", MAE)
def test_fine_tuning_of_mae(stem):
    lr, epochs, layer_decay, drop_path = MAE[stem]
    recipe = load_recipe(f"finetune/{stem}")
    check_mae(recipe, stem)
    assert (recipe.model.pool, recipe.model.drop_path, recipe.init.head) == ("normed_mean", drop_path, "zero")
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert (optimizer.lr, optimizer.layer_decay, optimizer.weight_decay) == (lr, layer_decay, 0.05)
    assert (schedule.duration.epochs, schedule.warmup.epochs, schedule.min_lr) == (epochs, 5, 1e-6)
    check_augmentation_of_deit(recipe)
    assert recipe.batch.global_size == 1024
    weights, decayed = decayed_of(recipe, build_model)
    assert decayed == {name for name, each in weights.items() if each.ndim == 2}


def check_swin(recipe):
    """What the authors' config.py has for all runs."""
    check_augmentation_of_deit(recipe)
    assert (recipe.data.crop.area, recipe.data.repeats) == ([0.08, 1], 1)
    assert recipe.data.normalise.mean == list(IMAGENET_DEFAULT_MEAN)
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.betas, optimizer.eps, optimizer.clip_norm) == ("adamw", [0.9, 0.999], 1e-8, 5)
    assert (recipe.schedule.decay, recipe.model.head) == ("cosine", "linear")


@pytest.mark.parametrize("stem", SWIN)
def test_swin(stem):
    """Liu et al. (2021) by their config.py and configs/swin; the learning rate is 5e-4 or 1.25e-4 x batch / 512."""
    name, drop_path, epochs, warmup, batch, params = SWIN[stem]
    recipe = load_recipe(stem)
    check_swin(recipe)
    assert (recipe.model.name, recipe.model.drop_path, recipe.batch.global_size) == (name, drop_path, batch)
    assert (recipe.schedule.duration.epochs, recipe.schedule.warmup.epochs) == (epochs, warmup)
    base = 1.25e-4 if "i21k" in stem else 5e-4
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (base * batch / 512, 0.05)
    assert recipe.schedule.min_lr == pytest.approx(recipe.optimizer.lr / 100)
    assert recipe_work(recipe, 1000).params / 1e6 == pytest.approx(params, abs=0.05)


def test_swin_at_384_pixels():
    recipe = load_recipe("finetune/swin_b_384")
    check_swin(recipe)
    assert (recipe.model.name, recipe.model.shape().window, recipe.model.drop_path) == ("Swin-B", 12, 0.2)
    assert (recipe.data.image_size, recipe.data.eval_crop.kind, recipe.data.eval_crop.fraction) == (384, "square", 1)
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (2e-5 * 1024 / 512, 1e-8)
    assert recipe.schedule.min_lr == 2e-7 * 1024 / 512
    assert (recipe.schedule.duration.epochs, recipe.schedule.warmup.epochs) == (30, 5)
    assert (recipe.batch.global_size, recipe.init.head, recipe.init.positions) == (1024, "zero", "resample")


def check_adam_of_later(recipe, lr, weight_decay):
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay, optimizer.clip_norm) == ("adamw", lr, weight_decay, 1)


def test_nothing_is_decayed_but_matrices():
    for stem in LATER:
        recipe = load_recipe(stem)
        weights, decayed = decayed_of(recipe, build_model)
        assert decayed == {name for name, each in weights.items() if each.ndim in (2, 4)}, stem


def test_simclr():
    """MoCo v3's command for a ViT-S (README.md, vits.py), and SimCLR's views, temperature and projection (run.py)."""
    recipe = load_recipe("simclr_s16_i1k")
    (view,), optimizer = recipe.data.views, recipe.optimizer
    jitter, gray, blur = view.operations
    assert (view.count, view.size, view.crop.area, view.flip) == (2, None, [0.08, 1], 0.5)
    assert (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue) == (0.8, 0.8, 0.8, 0.2)
    assert (jitter.probability, gray.probability, blur.probability, blur.radius) == (0.8, 0.2, 0.5, [0.1, 2])
    assert (recipe.objective.loss, recipe.objective.temperature, recipe.objective.group) == ("nt_xent", 0.1, "global")
    assert (recipe.objective.hidden, recipe.objective.outputs) == (2048, 128)
    assert optimizer.lr == pytest.approx(1.5e-4 * 4096 / 256)
    assert (optimizer.name, optimizer.betas, optimizer.weight_decay) == ("adamw", [0.9, 0.999], 0.1)
    assert (recipe.batch.global_size, recipe.schedule.duration.epochs, recipe.schedule.warmup.epochs) == (4096, 300, 40)
    assert (recipe.model.num_heads, recipe.model.position.table) == (12, "mae")
    with torch.device("meta"):
        names = [name for name, _ in build_objective(recipe, 1000).named_weights()]
    assert [name for name in names if is_frozen(optimizer, name)] == ["embedding.weight", "embedding.bias"]


def test_lejepa():
    """The hyper-parameters of the authors' README.md."""
    recipe = load_recipe("lejepa_l14_i1k")
    views, optimizer, schedule = recipe.data.views, recipe.optimizer, recipe.schedule
    assert [(view.name, view.count, view.size, view.crop.area) for view in views] == [
        ("global", 2, None, [0.3, 1]),
        ("local", 6, 98, [0.05, 0.3]),
    ]
    for view in views:
        jitter, gray, blur, solarize = view.operations
        assert (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue) == (0.4, 0.4, 0.2, 0.1)
        assert [each.probability for each in view.operations] == [0.8, 0.2, 0.5, 0.2] and solarize.threshold == 128
        assert (gray.kind, blur.kind) == ("gray", "gaussian_blur")
    assert (recipe.objective.weight, recipe.objective.directions, recipe.objective.center) == (0.05, 1024, ["global"])
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay, recipe.precision) == ("adamw", 5e-4, 0.05, "bf16")
    assert (schedule.duration.epochs, schedule.decay, schedule.min_lr) == (100, "cosine", optimizer.lr / 1000)


# Recipe -> shares of the area, KoLeo's weight, patches' prototypes, updates, batch, rate, drop path, rate of layers.
TAUGHT = {
    "dino_s16_i1k": ([0.4, 1], [0.05, 0.4], 0.0, None, None, 512, 1e-3, 0.1, None),
    "dinov2_l16_i1k": ([0.32, 1], [0.05, 0.32], 0.1, None, 125_000, 2048, 0.004 * 2**0.5, 0.3, 0.9),
    "dinov3_l16_i1k": ([0.32, 1], [0.05, 0.32], 0.1, 65_536, 125_000, 2048, 0.001 * 4 * 2**0.5, 0.3, 0.9),
    "ijepa_h14_i1k": None,
}


@pytest.mark.parametrize("stem", [stem for stem, settings in TAUGHT.items() if settings])
def test_dino(stem):
    """main_dino.py's defaults, dinov2's ssl_default_config.yaml, dinov3's train/vitl_im1k_lin834.yaml."""
    whole, part, koleo, of_patches, steps, batch, rate, drop_path, layer_decay = TAUGHT[stem]
    recipe = load_recipe(stem)
    views, settings, optimizer, schedule = recipe.data.views, recipe.objective, recipe.optimizer, recipe.schedule
    assert [(view.count, view.size) for view in views] == [(1, None), (1, None), (8, 96)]
    assert [view.crop.area for view in views] == [whole, whole, part]
    for view in views:
        jitter, gray = view.operations[:2]
        assert (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue) == (0.4, 0.4, 0.2, 0.1)
        assert (jitter.probability, gray.probability) == (0.8, 0.2)
    assert (settings.koleo, settings.prototypes, settings.hidden, settings.bottleneck) == (koleo, 65_536, 2048, 256)
    assert (settings.ibot is None) == (stem == "dino_s16_i1k") and settings.temperature == 0.1
    if settings.ibot is not None:
        found = settings.ibot.weight, settings.ibot.probability, settings.ibot.shares, settings.ibot.prototypes
        assert found == (1, 0.5, [0.1, 0.5], of_patches) and settings.teacher_temperature.over.steps == 30 * 1250
    assert (schedule.duration.steps, recipe.batch.global_size) == (steps, batch)
    assert optimizer.lr == pytest.approx(rate, rel=1e-3) and optimizer.layer_decay == layer_decay
    assert (optimizer.weight_decay, schedule.weight_decay.to, schedule.min_lr) == (0.04, 0.4, 1e-6)
    assert (recipe.model.drop_path, recipe.averages[0].to) == (drop_path, 1)


def test_ijepa():
    """configs/in1k_vith14_ep300.yaml."""
    recipe = load_recipe("ijepa_h14_i1k")
    settings, optimizer, schedule = recipe.objective, recipe.optimizer, recipe.schedule
    assert (settings.blocks, settings.area) == (4, [0.15, 0.2])
    assert (settings.predictor_width, settings.predictor_depth) == (384, 12)
    assert (recipe.data.crop.area, recipe.data.flip, recipe.batch.global_size) == ([0.3, 1], 0, 128 * 16)
    assert (optimizer.lr, optimizer.weight_decay, schedule.weight_decay.to, schedule.min_lr) == (1e-3, 0.04, 0.4, 1e-6)
    assert (schedule.duration.epochs, schedule.warmup.epochs) == (300, 40)
    assert (recipe.averages[0].decay, recipe.averages[0].to, recipe.averages[0].shape) == (0.996, 1, "linear")
