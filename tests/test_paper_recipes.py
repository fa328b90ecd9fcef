"""The recipes of the paper's grid against its Table 3, appendices B.1 and D, and later ones against what their authors
published: figures written out once more.
"""

import itertools
import math
import re
from pathlib import Path
from typing import Any

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
# Recipe -> shares of the area, KoLeo's weight, patches' prototypes, updates, batch, rate, drop path, rate of layers.
TAUGHT = {
    "dino_s16_i1k": ([0.4, 1], [0.05, 0.4], 0.0, None, None, 512, 1e-3, 0.1, None),
    "dinov2_l16_i1k": ([0.32, 1], [0.05, 0.32], 0.1, None, 125_000, 2048, 0.004 * 2**0.5, 0.3, 0.9),
    "dinov3_l16_i1k": ([0.32, 1], [0.05, 0.32], 0.1, 65_536, 125_000, 2048, 0.001 * 4 * 2**0.5, 0.3, 0.9),
}
LATER = (
    *("s16_i1k_90ep", "s16_i1k_300ep", "deit_ti16_i1k", "deit_s16_i1k", "deit_b16_i1k"),
    *("deit_ti16_distilled_i1k", "deit_s16_distilled_i1k", "deit_b16_distilled_i1k"),
    *(*AUGREG.values(), *AUGREG_I1K.values(), *DEIT3, *VIT5, *SWIN),
)
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

# ---- What recipes have in common -------------------------------------------------------------------------------------

ADAM = {"optimizer.name": "adamw", "optimizer.betas": [0.9, 0.999], "optimizer.eps": 1e-8}
WIDE_CROPS = {"data.crop.kind": "inception", "data.crop.area": [0.05, 1.0], "data.crop.aspect": [3 / 4, 4 / 3]}
PAPER = {
    **{**ADAM, **WIDE_CROPS, "optimizer.decay_exclude": None, "optimizer.clip_norm": None, "data.flip": 0.5},
    **{"batch.global_size": 4096, "data.image_size": 224, "objective.loss": "sigmoid", "model.head": "pretrain"},
    **{"schedule.warmup.steps": 10_000, "schedule.decay": "linear", "schedule.end_lr": 1e-5, "model.head_bias": None},
    **{"objective.on": 1.0, "objective.off": 0.0},
}
OF_JFT = PAPER | {"optimizer.weight_decay": 0.1, "model.dropout": 0.0, "model.num_classes": 18_291}
FINE_TUNING = {
    **{"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.weight_decay": 0.0, "batch.global_size": 512},
    **{"objective.loss": "softmax", "model.head": "linear", "model.num_classes": None, "init.head": "zero"},
    **{"init.positions": "resample", "data.eval_crop.kind": "square", "data.eval_crop.fraction": 1.0},
    **{"evaluation.every": None, "selection": None},  # the test set is looked at once, at the end
}
# Touvron et al. (2021) by the defaults of their main.py.
MIXING_OF_DEIT = {
    **{"objective.mixing.mixup": 0.8, "objective.mixing.cutmix": 1, "objective.mixing.cutmix_share": 0.5},
    "objective.mixing.per": "batch",
}
AUGMENTED_AS_DEIT = MIXING_OF_DEIT | {
    **{"objective.loss": "softmax", "objective.label_smoothing": 0.1},
    **{"data.operations.0.set": "timm_increasing", "data.operations.0.n": 2, "data.operations.0.m": 9},
    "data.operations.0.std": 0.5,
}
ERASED = {
    **{"data.operations.1.kind": "random_erasing", "data.operations.1.probability": 0.25},
    "data.operations.1.mode": "pixel",
}
IMAGENETS_MEAN = {"data.normalise.mean": list(IMAGENET_DEFAULT_MEAN)}
# Touvron et al. (2022) by the commands of README_revenge.md, and Wang et al. (2026), whose code is theirs.
OF_DEIT3 = (
    MIXING_OF_DEIT
    | IMAGENETS_MEAN
    | {
        **{"model.drop_path_rule": "uniform", "model.layer_scale": 1e-4, "model.class_position": False},
        **{"model.mlp": "exact_gelu", "model.head": "linear", "data.crop.area": [0.08, 1]},
        **{"schedule.warmup.epochs": 5, "schedule.decay": "cosine"},
    }
)
DEIT3_AT_LENGTH = {
    **{"data.repeats": 3, "optimizer.name": "lamb", "optimizer.weight_decay": 0.05, "optimizer.clip_norm": 1},
    **{"optimizer.betas": [0.9, 0.999], "optimizer.eps": 1e-8},  # their --opt-eps, which FusedLAMB is given
    **{"batch.global_size": 2048, "objective.loss": "bce", "objective.threshold": 0, "objective.label_smoothing": 0},
    **{"data.operations.0.kind": "three_augment", "data.operations.0.jitter": 0.3},
}
MODEL_OF_VIT5 = {  # models_vit5.py
    **{"model.norm": "rms", "model.qk_norm": True, "model.qkv_bias": "none", "model.registers": 4},
    **{"model.position.kind": "1d_rope", "model.position.unit": "patch", "model.position.base": 10_000},
    "model.position.registers_base": 100,
}
MODEL_OF_MAE = IMAGENETS_MEAN | {  # vit_*_patch16 and mae_vit_*_patch16 of He et al.'s code
    **{"model.mlp": "exact_gelu", "model.position.kind": "sincos", "model.position.table": "mae"},
    "data.image_size": 224,
}
# Liu et al. (2021) by what their config.py has for all runs.
OF_SWIN = (
    AUGMENTED_AS_DEIT
    | ERASED
    | ADAM
    | IMAGENETS_MEAN
    | {
        **{"data.crop.area": [0.08, 1], "data.repeats": 1, "optimizer.clip_norm": 5},
        **{"schedule.decay": "cosine", "model.head": "linear"},
    }
)
JITTER = ("brightness", "contrast", "saturation", "hue")


def jitter(at: str, strengths: tuple[float, ...], *probabilities: float) -> dict[str, Any]:
    """Operations from `at` on, of which the first jitters colours."""
    found = {f"{at}.operations.0.{name}": value for name, value in zip(JITTER, strengths, strict=True)}
    return found | {f"{at}.operations.{i}.probability": value for i, value in enumerate(probabilities)}


def of_name(stem: str) -> str:
    size, patch = re.findall(r"(?:^|_)([a-z])(\d\d)_", stem)[0]
    return f"ViT-{size.upper()}/{patch}"


# ---- Every recipe ----------------------------------------------------------------------------------------------------

EXPECTED: dict[str, dict[str, Any]] = {
    stem: {**OF_JFT, "model.name": model, "schedule.duration.epochs": epochs, "optimizer.lr": lr}
    | {"data.train": "jft300m/train"}
    for stem, (model, epochs, lr) in JFT.items()
}
EXPECTED |= {
    stem: {**PAPER, "optimizer.lr": 1e-3, "optimizer.weight_decay": 0.03, "model.name": of_name(stem)}
    | {"schedule.duration.epochs": epochs, "model.dropout": 0.1, "model.num_classes": 21_843}
    | {"objective.on": 0.9999, "objective.off": 0.0001}
    for stem, epochs in I21K.items()
}
EXPECTED |= {
    stem: {**PAPER, "schedule.decay": "cosine", "optimizer.lr": 3e-3, "optimizer.weight_decay": 0.3}
    | {"optimizer.clip_norm": 1.0, "schedule.duration.epochs": 300, "model.dropout": 0.1, "model.num_classes": 1000}
    | {"model.name": of_name(stem)}
    for stem in I1K
}
EXPECTED |= {
    f"{short}_jft{size}": {**OF_JFT, "optimizer.lr": lr, "model.name": model}
    | {"data.train": "jft300m/train" if size == "300m" else f"jft300m/train-{size}"}
    | {"schedule.duration.steps": 7 * (303_000_000 // 4096)}  # as many images whatever the size
    | {"selection.metric": "validation/top1", "evaluation.fewshot.tasks.0.name": "imagenet"}
    for short, (model, lr) in FIGURE_4.items()
    for size in ("9m", "30m", "90m", "300m")
}
EXPECTED |= {
    f"b16_{short}_jft": {**OF_JFT, "optimizer.lr": 8e-4, "model.name": "ViT-B/16", "schedule.duration.epochs": 7}
    | {"model.position.kind": kind, "model.position.at": at}
    for short, (kind, at) in TABLE_8.items()
}
EXPECTED |= {
    "axial_b32_jft": {**OF_JFT, "optimizer.lr": 8e-4, "model.name": "Axial-ViT-B/32"},
    "axial_b16_jft": {**OF_JFT, "optimizer.lr": 8e-4, "model.name": "Axial-ViT-B/16"},
    "axial_r50_jft": {**OF_JFT, "optimizer.lr": 1e-3, "model.name": "AxialResNet50"},
}
# Kolesnikov et al. (2020): 0.03 * batch / 256, momentum 0.9, weight decay 1e-4, 40 epochs in stairs.
EXPECTED |= {
    stem: {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.weight_decay": 1e-4}
    | {"optimizer.lr": 0.03 * 4096 / 256, "schedule.warmup.steps": 5_000}
    | {f"schedule.boundaries.{i}.epochs": 7 * at / 40 for i, at in enumerate((10, 23, 30, 37))}
    for stem in ("r50x1_sgd_jft", "r152x2_sgd_jft")
}
# Appendix B.1.2: Adam at 2e-4, 10,000 steps of warmup, cosine, a million steps of 4,096 images.
EXPECTED |= {
    stem: {**ADAM, "optimizer.lr": 2e-4, "optimizer.weight_decay": 0.1, "optimizer.clip_norm": None}
    | {"optimizer.decay_exclude": None, "objective.kind": "masked_patches", "objective.target": target}
    | {"objective.share": share, "schedule.warmup.steps": 10_000, "schedule.decay": "cosine"}
    | {"schedule.duration.steps": 100_000 if "i21k" in stem else 1_000_000, "batch.global_size": 4096}
    | {"model.name": "ViT-B/16", "model.dropout": 0}
    for stem, target, share in (
        ("b16_jft_masked", "mean_colour", 0.5),
        ("b16_jft_masked_cells", "cell_colours", 0.5),
        ("b16_jft_masked_pixels", "pixels", 0.5),
        ("b16_jft_masked_15pct", "mean_colour", 0.15),
        ("b16_i21k_masked", "mean_colour", 0.5),
    )
}
EXPECTED |= {
    f"finetune/{name}": {**FINE_TUNING, "schedule.duration.steps": steps, "schedule.warmup.steps": warmup}
    | {"data.image_size": image_size, "model.name": model, "model.dropout": dropout, "optimizer.clip_norm": 1.0}
    | {"optimizer.momentum_dtype": "bf16", "schedule.decay": "cosine", "optimizer.lr": 0.03}
    | ({"ema.decay": 0.9999, "ema.warmup": True} if "_5" in name else {"ema": None})
    | WIDE_CROPS
    | {"data.flip": 0.5}
    for name, (steps, warmup, image_size, model, dropout) in TABLE_4.items()
}
for key in (*WIDE_CROPS, "data.flip"):
    del EXPECTED["finetune/vtab"][key]
EXPECTED["finetune/vtab"] |= {**{"optimizer.lr": 0.01, "data.crop.kind": "resize", "data.crop.fraction": 480 / 512}}
EXPECTED |= {
    f"finetune/{name}": {**FINE_TUNING, "schedule.duration.steps": steps, "schedule.warmup.steps": warmup}
    | {"data.image_size": image_size, "optimizer.lr": 0.003, "optimizer.clip_norm": None}
    | {"schedule.decay": "stairs", "schedule.factor": 0.1, "data.crop.kind": "resize"}
    | {"data.crop.fraction": image_size / square}
    | {f"schedule.boundaries.{i}.steps": at for i, at in enumerate(boundaries)}
    | (  # of tasks of 20,000 examples and more
        {"objective.mixing": None}
        if steps == 500
        else {"objective.mixing.mixup": 0.1, "objective.mixing.cutmix": 0, "objective.mixing.per": "batch"}
    )
    for name, (image_size, square, steps, warmup, boundaries) in HYPERRULE.items()
}
# Beyer et al. (2022) by big_vision's configs/vit_s16_i1k.py, whose weight decay is not multiplied by the rate.
EXPECTED |= {
    f"s16_i1k_{epochs}ep": {"model.name": "ViT-S/16", "model.pool": "mean", "model.head": "pretrain"}
    | {"model.position.kind": "sincos", "model.dropout": 0, "model.drop_path": 0, "batch.global_size": 1024}
    | {"schedule.duration.epochs": epochs, "schedule.warmup.steps": 10_000, "schedule.decay": "cosine"}
    | {"optimizer.lr": 1e-3, "optimizer.weight_decay": 1e-4 / 1e-3, "optimizer.clip_norm": 1}
    | {"data.operations.0.set": "big_vision", "data.operations.0.n": 2, "data.operations.0.m": 10}
    | {"objective.loss": "softmax", "objective.label_smoothing": 0, "objective.mixing.mixup": 0.2}
    | {"objective.mixing.cutmix": 0, "objective.mixing.probability": 1, "objective.mixing.per": "batch"}
    for epochs in (90, 300)
}
EXPECTED |= {
    f"deit_{size}_i1k": AUGMENTED_AS_DEIT
    | ERASED
    | {"objective.kind": "distillation" if "distilled" in size else "classification", "data.crop.area": [0.08, 1]}
    | {"model.drop_path": 0.1, "model.dropout": 0, "data.repeats": 3, "batch.global_size": 1024}
    | {"schedule.duration.epochs": 300, "schedule.warmup.epochs": 5, "optimizer.lr": 5e-4 * 1024 / 512}
    | {"optimizer.weight_decay": 0.05, "optimizer.clip_norm": None}
    for size in ("ti16", "s16", "b16", "ti16_distilled", "s16_distilled", "b16_distilled")
}


def of_augreg(file: str) -> dict[str, Any]:
    """The published weights are called by the settings that they were trained with."""
    name, settings = file.split("-", 1)
    *stem, size, patch = name.split("_")
    said = dict(part.split("_") for part in settings.split("-")[2:])
    of_imagenet = {"model.head": "pretrain", "model.head_bias": -6.9, "model.num_classes": 1000}
    of_21k = {"model.head": "linear", "model.head_bias": -10, "model.num_classes": 21_843}
    return (of_imagenet if settings.startswith("i1k") else of_21k) | {
        **{"model.name": f"{''.join(f'{part}+' for part in stem)}ViT-{size}/{patch}", "objective.loss": "sigmoid"},
        **{"model.dropout": float(said["do"]), "model.drop_path": float(said["sd"]), "optimizer.name": "adamw"},
        **{"optimizer.lr": float(said["lr"]), "optimizer.weight_decay": float(said["wd"]), "optimizer.clip_norm": 1},
        **{"batch.global_size": 4096, "schedule.duration.epochs": 300, "schedule.warmup.steps": 10_000},
        "schedule.decay": "cosine",
    }


EXPECTED |= {stem: of_augreg(file) for file, stem in (AUGREG | AUGREG_I1K).items()}
EXPECTED |= {
    stem: {**OF_DEIT3, **DEIT3_AT_LENGTH, "model.drop_path": drop_path, "data.image_size": side, "optimizer.lr": lr}
    | {"schedule.duration.epochs": 800}
    for stem, (side, lr, drop_path, _) in DEIT3.items()
}
EXPECTED |= {
    stem: {**OF_DEIT3, **DEIT3_AT_LENGTH, **MODEL_OF_VIT5, "model.drop_path": drop_path, "data.image_size": side}
    | {"optimizer.lr": lr, "schedule.duration.epochs": epochs}
    for stem, (side, lr, drop_path, epochs, _) in VIT5.items()
}
EXPECTED |= {
    f"finetune/{stem}": {**OF_DEIT3, **AUGMENTED_AS_DEIT, "model.drop_path": drop_path, "init.head": "keep"}
    | (MODEL_OF_VIT5 if stem.startswith("vit5") else {})
    | {"data.image_size": 224, "data.repeats": 1, "schedule.duration.epochs": 20, "optimizer.name": "adamw"}
    | {"optimizer.lr": 1e-5, "optimizer.weight_decay": 0.1, "optimizer.clip_norm": None, "batch.global_size": 512}
    | {"model.name": f"ViT-{stem[-3].upper()}/{stem[-2:]}"}
    for stem, drop_path in LAST_EPOCHS.items()
}
# He et al. (2022) by the command of PRETRAIN.md and the defaults of main_pretrain.py, models_mae.py.
EXPECTED |= {
    stem: {**MODEL_OF_MAE, "model.name": of_name(stem), "objective.kind": "mae", "objective.removed": 0.75}
    | {"objective.norm_pix": True, "objective.decoder_width": 512, "objective.decoder_depth": 8}
    | {"objective.decoder_heads": 16, "optimizer.name": "adamw", "optimizer.betas": [0.9, 0.95]}
    | {"optimizer.weight_decay": 0.05, "optimizer.lr": 1.5e-4 * 4096 / 256, "optimizer.clip_norm": None}
    | {"batch.global_size": 4096, "schedule.duration.epochs": 1600, "schedule.warmup.epochs": 40}
    | {"schedule.decay": "cosine", "schedule.min_lr": 0, "data.crop.area": [0.2, 1]}
    for stem in MAE
}
EXPECTED |= {
    f"finetune/{stem}": {**MODEL_OF_MAE, **AUGMENTED_AS_DEIT, **ERASED, "model.name": of_name(stem)}
    | {"model.pool": "normed_mean", "model.drop_path": drop_path, "init.head": "zero", "optimizer.lr": lr}
    | {"optimizer.layer_decay": layer_decay, "optimizer.weight_decay": 0.05, "schedule.duration.epochs": epochs}
    | {"schedule.warmup.epochs": 5, "schedule.min_lr": 1e-6, "batch.global_size": 1024}
    for stem, (lr, epochs, layer_decay, drop_path) in MAE.items()
}
EXPECTED |= {  # the learning rate is 5e-4 or 1.25e-4 x batch / 512
    stem: {**OF_SWIN, "model.name": name, "model.drop_path": drop_path, "batch.global_size": batch}
    | {"schedule.duration.epochs": epochs, "schedule.warmup.epochs": warmup, "optimizer.weight_decay": 0.05}
    | {"optimizer.lr": (1.25e-4 if "i21k" in stem else 5e-4) * batch / 512}
    | {"schedule.min_lr": (1.25e-6 if "i21k" in stem else 5e-6) * batch / 512}
    for stem, (name, drop_path, epochs, warmup, batch, _) in SWIN.items()
}
EXPECTED["finetune/swin_b_384"] = OF_SWIN | {
    **{"model.name": "Swin-B", "model.window": 12, "model.drop_path": 0.2, "data.image_size": 384},
    **{"data.eval_crop.kind": "square", "data.eval_crop.fraction": 1, "optimizer.lr": 2e-5 * 1024 / 512},
    **{"optimizer.weight_decay": 1e-8, "schedule.min_lr": 2e-7 * 1024 / 512, "schedule.duration.epochs": 30},
    **{"schedule.warmup.epochs": 5, "batch.global_size": 1024, "init.head": "zero", "init.positions": "resample"},
}
# Bao et al. (2022) by the command for ImageNet-1k of beit/README.md and run_beit_pretraining.py's defaults.
EXPECTED["beit_b16_i1k"] = jitter("data", (0.4, 0.4, 0.4, 0), 1) | {
    **{"objective.masks": "blocks", "objective.targets.path": "transformers:FlavaImageCodebook"},
    **{"objective.targets.vocabulary": 8192, "objective.targets.image_size": 112, "model.name": "ViT-B/16"},
    **{"model.layer_scale": 0.1, "model.drop_path": 0.1, "model.mlp": "exact_gelu", "model.qkv_bias": "no_key"},
    **{"optimizer.lr": 1.5e-3, "optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.05},
    **{"optimizer.clip_norm": 3, "batch.global_size": 2048, "schedule.duration.epochs": 800},
    **{"schedule.warmup.epochs": 10, "schedule.decay": "cosine", "schedule.min_lr": 1e-5},
    "data.crop.area": [0.08, 1],
}
# MoCo v3's command for a ViT-S (README.md, vits.py), and SimCLR's views, temperature and projection (run.py).
EXPECTED["simclr_s16_i1k"] = jitter("data.views.0", (0.8, 0.8, 0.8, 0.2), 0.8, 0.2, 0.5) | {
    **{"data.views.0.count": 2, "data.views.0.size": None, "data.views.0.crop.area": [0.08, 1]},
    **{"data.views.0.flip": 0.5, "data.views.0.operations.2.radius": [0.1, 2], "objective.loss": "nt_xent"},
    **{"objective.temperature": 0.1, "objective.group": "global", "objective.hidden": 2048, "objective.outputs": 128},
    **{**ADAM, "optimizer.lr": 1.5e-4 * 4096 / 256, "optimizer.weight_decay": 0.1, "batch.global_size": 4096},
    **{"schedule.duration.epochs": 300, "schedule.warmup.epochs": 40, "model.num_heads": 12},
    "model.position.table": "mae",
}
# The hyper-parameters of the authors' README.md.
EXPECTED["lejepa_l14_i1k"] = {
    **{"data.views.0.name": "global", "data.views.0.count": 2, "data.views.0.size": None},
    **{"data.views.1.name": "local", "data.views.1.count": 6, "data.views.1.size": 98},
    **{"data.views.0.crop.area": [0.3, 1], "data.views.1.crop.area": [0.05, 0.3]},
    **{"objective.weight": 0.05, "objective.directions": 1024, "objective.center": ["global"]},
    **{"optimizer.name": "adamw", "optimizer.lr": 5e-4, "optimizer.weight_decay": 0.05, "precision": "bf16"},
    **{"schedule.duration.epochs": 100, "schedule.decay": "cosine", "schedule.min_lr": 5e-7},
}
for at in ("data.views.0", "data.views.1"):
    EXPECTED["lejepa_l14_i1k"] |= jitter(at, (0.4, 0.4, 0.2, 0.1), 0.8, 0.2, 0.5, 0.2) | {
        **{f"{at}.operations.{i}.kind": kind for i, kind in ((1, "gray"), (2, "gaussian_blur"))},
        f"{at}.operations.3.threshold": 128,
    }
# main_dino.py's defaults, dinov2's ssl_default_config.yaml, dinov3's train/vitl_im1k_lin834.yaml.
for stem, (whole, part, koleo, of_patches, steps, batch, rate, drop_path, layer_decay) in TAUGHT.items():
    EXPECTED[stem] = {
        **{"objective.koleo": koleo, "objective.prototypes": 65_536, "objective.hidden": 2048},
        **{"objective.bottleneck": 256, "objective.temperature": 0.1, "schedule.duration.steps": steps},
        **{"batch.global_size": batch, "optimizer.lr": round(rate, 6), "optimizer.layer_decay": layer_decay},
        **{"optimizer.weight_decay": 0.04, "schedule.weight_decay.to": 0.4, "schedule.min_lr": 1e-6},
        **{"model.drop_path": drop_path, "averages.0.to": 1},
    }
    for i, (count, size, area) in enumerate(((1, None, whole), (1, None, whole), (8, 96, part))):
        view = {f"data.views.{i}.count": count, f"data.views.{i}.size": size, f"data.views.{i}.crop.area": area}
        EXPECTED[stem] |= view | jitter(f"data.views.{i}", (0.4, 0.4, 0.2, 0.1), 0.8, 0.2)
    of_ibot = {"weight": 1, "probability": 0.5, "shares": [0.1, 0.5], "prototypes": of_patches}
    EXPECTED[stem] |= (
        {"objective.ibot": None}
        if stem == "dino_s16_i1k"
        else {f"objective.ibot.{key}": value for key, value in of_ibot.items()}
        | {"objective.teacher_temperature.over.steps": 30 * 1250}
    )
# configs/in1k_vith14_ep300.yaml.
EXPECTED["ijepa_h14_i1k"] = {
    **{"objective.blocks": 4, "objective.area": [0.15, 0.2], "objective.predictor_width": 384},
    **{"objective.predictor_depth": 12, "data.crop.area": [0.3, 1], "data.flip": 0, "batch.global_size": 128 * 16},
    **{"optimizer.lr": 1e-3, "optimizer.weight_decay": 0.04, "schedule.weight_decay.to": 0.4},
    **{"schedule.min_lr": 1e-6, "schedule.duration.epochs": 300, "schedule.warmup.epochs": 40},
    **{"averages.0.decay": 0.996, "averages.0.to": 1, "averages.0.shape": "linear"},
}
EXPECTED |= {
    stem: {"model.name": model, "model.drop_path": drop_path, "averages.0.decay": 0.999, "averages.0.to": None}
    | {"objective.koleo": 0.1, "objective.prototypes": 16384, "schedule.weight_decay": None}
    | {"objective.ibot.prototypes": 16384 if "v3" in stem else None, "schedule.warmup.steps": 2500 + 5000}
    | {"evaluation.at_start": True}
    for stem, (model, drop_path) in CONTINUED.items()
}


def at_key(recipe: Any, key: str) -> Any:
    """The value at a dotted key, of which numbers are places in lists."""
    if key == "model.dropout":  # which ResNets have only where they are written out
        return recipe.dump()["model"]["dropout"]
    if key == "model.window":
        return recipe.model.shape().window
    for part in key.split("."):
        recipe = recipe[int(part)] if part.isdigit() else getattr(recipe, part)
    return recipe


def are_equal(found: Any, expected: Any) -> bool:
    is_number = isinstance(expected, float) and isinstance(found, int | float)
    return math.isclose(found, expected, rel_tol=1e-9) if is_number else found == expected


@pytest.mark.parametrize("stem", EXPECTED)
def test_a_recipe_has_the_published_figures(stem):
    recipe = load_recipe(stem)
    found = {key: at_key(recipe, key) for key in EXPECTED[stem]}
    assert [(key, found[key], value) for key, value in EXPECTED[stem].items() if not are_equal(found[key], value)] == []
    if stem in FEWSHOT:
        assert 5 in recipe.evaluation.fewshot.shots
    if "data.operations.0.set" in EXPECTED[stem] or "data.operations.0.hue" in EXPECTED[stem]:
        assert len(recipe.data.operations) == 1 + ("data.operations.1.kind" in EXPECTED[stem])


FEWSHOT = {*(f"b16_{short}_jft" for short in TABLE_8), "axial_b32_jft", "axial_b16_jft", "axial_r50_jft"}


def test_no_recipe_is_left_out():
    shapes = {path.stem for path in recipes_dir().glob("shape_*_jft.yaml")}  # below
    found = {path.stem for path in recipes_dir().glob("*.yaml")}
    found |= {f"finetune/{path.stem}" for path in recipes_dir().glob("finetune/*.yaml")}
    found = {stem for stem in found if not stem.startswith("miniature")}
    assert found == {*EXPECTED, *shapes, "demo", "vit4_cifar10", "continue_mae_b16"}


# ---- What is no single figure ----------------------------------------------------------------------------------------


def test_the_shape_study_varies_one_thing_at_a_time():
    base, expected = load_recipe("shape_base_jft"), OF_JFT | {"optimizer.lr": 6e-4}
    base_shape = base.model.shape()
    assert (base_shape.depth, base_shape.width, base_shape.mlp_dim, base_shape.patch_size) == (8, 1024, 2048, 32)
    keys = {"depth": "depth", "width": "width", "mlp": "mlp_dim", "patch": "patch_size"}
    seen = set()
    for file in recipes_dir().glob("shape_*_jft.yaml"):
        recipe = load_recipe(file)
        assert [key for key, value in expected.items() if not are_equal(at_key(recipe, key), value)] == []
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


def level_of(recipe):
    """(magnitude of RandAugment, alpha of mixup), as `LEVELS` has them."""
    mixing = recipe.objective.mixing
    if not recipe.data.operations:
        return None, mixing
    (augmentation,) = recipe.data.operations
    assert (augmentation.set, augmentation.n) == ("big_vision", 2)
    return augmentation.m, None if mixing is None else mixing.mixup


@pytest.mark.parametrize("file", [*AUGREG, *AUGREG_I1K])
def test_levels_of_augreg_are_those_of_the_files_names(file):
    said = re.findall(r"-aug_(\w+?\d?)-", file)[0]
    assert level_of(load_recipe((AUGREG | AUGREG_I1K)[file])) == LEVELS[said]


def test_all_levels_of_augreg_are_a_study():
    entries = expand(load_study("augreg_levels"), Path("runs")).entries
    assert len(entries) == 56
    for data, size in itertools.product(("i1k", "i21k"), ("ti16", "s16", "b16", "l16")):
        runs = [entry.options[0].recipe for name, entry in entries.items() if f"-augreg_{size}_{data}-" in name]
        assert [level_of(recipe) for recipe in runs] == list(LEVELS.values())
        assert {recipe.model.drop_path for recipe in runs} == {recipe.model.dropout for recipe in runs} == {0}


# Of their models: DeiT's exactly, others in millions with the digits that their authors print, at 224 pixels.
PARAMETERS = {
    **{"deit_ti16_i1k": (5_717_416, 0), "deit_s16_i1k": (22_050_664, 0), "deit_b16_i1k": (86_567_656, 0)},
    **{"deit_ti16_distilled_i1k": (5_910_800, 0), "deit_s16_distilled_i1k": (22_436_432, 0)},
    "deit_b16_distilled_i1k": (87_338_192, 0),
    **{stem: (1e6 * params, 0.06e6) for stem, (*_, params) in DEIT3.items()},
    **{stem: (1e6 * params, 0.6e6) for stem, (*_, params) in VIT5.items()},
    **{stem: (1e6 * params, 0.05e6) for stem, (*_, params) in SWIN.items()},
}


@pytest.mark.parametrize("stem", PARAMETERS)
def test_models_have_the_published_number_of_parameters(stem):
    recipe, (params, within) = load_recipe(stem), PARAMETERS[stem]
    at_224 = override(recipe.dump(), ["data.image_size=224"], stem) if stem in DEIT3 else recipe
    assert recipe_work(at_224, 1000).params == pytest.approx(params, abs=within)


@pytest.mark.parametrize("stem", VIT5)
def test_vit5_is_trained_as_deit3(stem):
    recipe, deit3 = load_recipe(stem), load_recipe(stem.replace("vit5", "deit3"))
    for block in ("data", "batch", "objective"):
        assert getattr(recipe, block) == getattr(deit3, block)
    one, other = (each.optimizer.model_copy(update={"decay_exclude": None}) for each in (recipe, deit3))
    assert one == other


@pytest.mark.parametrize("stem", ["r50x1_sgd_jft", "r152x2_sgd_jft"])
def test_of_sgd_and_adam_model_and_length_are_the_same(stem):
    recipe, adam = load_recipe(stem), load_recipe(stem.replace("_sgd", ""))
    assert recipe.model == adam.model and recipe.schedule.duration == adam.schedule.duration
    assert len(recipe.schedule.boundaries) == 4


def decayed_of(recipe, build):
    """Parameters by name, and the names of those with weight decay."""
    with torch.device("meta"):
        built = build(recipe, 1000)
    weights = dict(built.named_parameters() if build is build_model else built.named_weights())
    return weights, {name for name in weights if not re.search(recipe.optimizer.decay_exclude, name)}


def test_what_is_decayed():
    """Nothing but matrices; by MAE timm 0.3.2's rule, by BEiT all but the class token and positions."""
    for stem in LATER:
        weights, decayed = decayed_of(load_recipe(stem), build_model)
        assert decayed == {name for name, each in weights.items() if each.ndim in (2, 4)}, stem
    for stem in MAE:
        weights, decayed = decayed_of(load_recipe(stem), build_objective)
        assert decayed == {name for name, each in weights.items() if each.ndim > 1}
        weights, decayed = decayed_of(load_recipe(f"finetune/{stem}"), build_model)
        assert decayed == {name for name, each in weights.items() if each.ndim == 2}
    weights, decayed = decayed_of(load_recipe("beit_b16_i1k"), build_objective)
    assert decayed == {name for name, each in weights.items() if each.ndim > 1} - {"cls", "pos_embedding"}


def test_as_many_patches_are_masked_and_pixels_as_the_tokenizer_has_them():
    for stem, kept in (("mae_b16_i1k", 49), ("mae_l16_i1k", 49), ("mae_h14_i1k", 64)):
        recipe = load_recipe(stem)
        assert recipe.objective.kept(recipe.context) == kept
    recipe = load_recipe("beit_b16_i1k")
    assert recipe.objective.counts(recipe.context) == (75, 0, 0)
    normalise = recipe.objective.targets.normalise
    for mean, std in zip(normalise.mean, normalise.std, strict=True):
        assert [(x - mean) / std for x in (0.0, 1.0)] == pytest.approx([0.1, 0.9])  # map_pixels of openai/DALL-E


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
    recipe = load_recipe(stem)
    optimizer, schedule = recipe.optimizer, recipe.schedule
    with torch.device("meta"):
        names = [name for name, _ in build_objective(recipe, 0).named_weights()]
    begins = {name: group_of(optimizer, name).begin.steps for name in names}
    assert {begins[name] for name in names if not recipe.objective.owns(name)} == {2500}
    assert {name for name in names if begins[name] == 1250} == {name for name in names if ".last." in name} != set()
    assert {begins[name] for name in names if recipe.objective.owns(name) and ".last." not in name} == {0}
    assert 2e-5 <= optimizer.lr / (recipe.batch.global_size / 1024) ** 0.5 <= 1e-4
    assert recipe.objective.teacher_temperature.over.steps * 5 == schedule.duration.steps
    patch = recipe.model.patches(recipe.data.image_size).size
    # It cannot end before the warmup does.
    assert recipe.selection.patience * recipe.evaluation.every.steps > schedule.warmup.steps
    assert 2500 % recipe.evaluation.every.steps == 0
    assert all(side % patch == 0 for _, side in recipe.data.training_views())


def test_the_first_layer_of_simclr_is_frozen():
    recipe = load_recipe("simclr_s16_i1k")
    with torch.device("meta"):
        names = [name for name, _ in build_objective(recipe, 1000).named_weights()]
    assert [name for name in names if is_frozen(recipe.optimizer, name)] == ["embedding.weight", "embedding.bias"]
