"""What the schema does not say about a field: its unit, what else it changes, and what the paper says of it."""

from typing import NamedTuple

from vitscale.recipe.comparing import FREE_ON_BRANCHING, FREE_ON_RESUME

NO_UNIT = "none"

_KEYS_BY_UNIT = {
    "images": "batch.global batch.micro_max evaluation.batch objective.group",
    "images per class": "evaluation.fewshot.shots",
    "views per sample": "data.repeats data.views.N.count",
    "batches": "data.prefetch",
    "blocks of patches": "objective.blocks",
    "pixels": "data.image_size model.patch_size data.operations.N.radius data.operations.N.kernel data.views.N.size "
    "objective.targets.image_size",
    "channels": "model.width model.mlp_dim objective.decoder_width objective.hidden objective.outputs "
    "objective.bottleneck objective.predictor_width",
    "classes": "model.num_classes",
    "tokens": "model.registers",
    "numbers": "objective.targets.vocabulary",
    "tokens along a side": "model.window",
    "heads": "model.num_heads objective.decoder_heads objective.predictor_heads",
    "ranks": "parallelism.hpz_size",
    "blocks": "model.depth objective.decoder_depth objective.predictor_depth parallelism.activation_checkpointing",
    "residual units, or Transformer blocks": "model.blocks",
    "parameters along a side": "optimizer.factored_from",
    "operations": "data.operations.N.n",
    "prototypes": "objective.prototypes objective.ibot.prototypes",
    "levels of a pixel, 0 to 255": "data.operations.N.fill data.operations.N.threshold",
    "pixel values from 0 to 1": "data.normalise.mean data.normalise.std objective.targets.normalise.mean "
    "objective.targets.normalise.std",
    "logits": "model.head_bias",
    "threads": "data.threads",
    "GB of 10**9 bytes": "data.cache.limit_gb evaluation.evaluators.N.limit_gb",
    "seconds": "data.stall_s check.step_timeout_s",
    "steps": "init.step objective.teacher.step anomalies.spike.window check.replicas_every check.recompute_every "
    "check.audit_every logging.every profile.steps evaluation.evaluators.N.steps",
    "checkpoints": "checkpoint.keep",
    "saves": "checkpoint.max_failures",
    "evaluations": "selection.patience",
    "draws": "evaluation.fewshot.seeds",
    "neighbours": "evaluation.knn.k",
    "times": "anomalies.limit",
    "median absolute deviations x 1.4826": "anomalies.spike.factor",
    "L2 norm of the gradient": "optimizer.clip_norm",
    "magnitude, 0 to 30": "data.operations.N.m data.operations.N.std",
    "probability, 0 to 1": "data.flip data.operations.N.probability objective.mixing.probability "
    "objective.mixing.cutmix_share objective.on objective.off objective.label_smoothing objective.threshold",
    "share, 0 to 1": "model.dropout model.drop_path data.check_rate data.crop.area data.crop.fraction "
    "data.eval_crop.fraction data.operations.N.area data.operations.N.hue objective.keep objective.share "
    "objective.removed objective.ibot.probability objective.ibot.shares objective.area objective.context "
    "objective.mixing.cutmix_sides evaluation.fewshot.crop.fraction evaluation.knn.crop.fraction "
    "evaluation.evaluators.N.crop.fraction "
    "parallelism.activation_budget",
    NO_UNIT: "seed model.width_factor model.norm_eps model.layer_scale model.position.base "
    "model.position.registers_base model.position.rescale model.position.jitter "
    "data.crop.aspect data.operations.N.jitter data.operations.N.brightness "
    "data.operations.N.contrast data.operations.N.saturation data.operations.N.aspect objective.mixing.mixup "
    "objective.mixing.cutmix optimizer.lr optimizer.betas optimizer.eps optimizer.weight_decay optimizer.layer_decay "
    "optimizer.groups.N.lr_factor optimizer.groups.N.weight_decay optimizer.momentum optimizer.beta2_cap "
    "schedule.end_lr schedule.min_lr schedule.factor schedule.cycle_factor schedule.restart_factor "
    "schedule.weight_decay.to schedule.momentum.to parallelism.zero_stage evaluation.fewshot.l2 ema.decay "
    "averages.N.decay averages.N.to objective.temperature objective.weight objective.directions "
    "objective.teacher_temperature.from objective.teacher_temperature.to objective.koleo objective.ibot.weight "
    "objective.gram.weight.from objective.gram.weight.to",
}
_UNITS = {key: unit for unit, keys in _KEYS_BY_UNIT.items() for key in keys.split()}

_TOUCHES = {
    "batch.global": "micro-batch and accumulation (with batch.micro_max and the number of ranks, which has to divide "
    "it); steps per epoch, and so every duration in epochs or examples; which samples a step sees",
    "batch.micro_max": "memory of a device and speed; the update changes only by rounding and dropout",
    "checkpoint.every": "the maximum number of steps lost in a crash",
    "data.image_size": "number of tokens, and so memory and FLOPs; the side has to hold one patch",
    "data.repeats": "samples per step: batch.global / data.repeats",
    "data.train": "steps per epoch; model.num_classes, if the recipe does not set it",
    "data.threads": "only speed",
    "model.num_classes": "the output layer",
    "model.patch_size": "tokens: (data.image_size / patch_size) squared, rounded down on each side",
    "model.head": "what `vitscale export` can write: formats without pre_logits need --drop-head",
    "objective.loss": "model.head_bias, if the recipe does not set it",
    "optimizer.lr": "the top of the schedule; the weight decay step, which is multiplied by it",
    "parallelism.zero_stage": "memory of a device and traffic between devices; results only by rounding",
    "precision": "memory, speed and rounding; fixed when a run begins",
    "schedule.duration": "with decay: linear or cosine, the learning rate of every step, which falls until the end",
    "seed": "initial weights, the order of samples, crops, flips, dropout: another seed is another run",
}
"""Key -> what the field affects besides what its description says."""

_PAPERS = {
    "batch.global": "4,096 to pre-train (Table 3), 512 to fine-tune (Table 4)",
    "data.crop.area": "silent; the authors' code has 5 to 100 % of the area",
    "data.flip": "silent; the authors' code has 0.5",
    "data.image_size": "224 to pre-train (Table 3), 384 to fine-tune (Table 4), 512 and 518 on ImageNet (section 4.1)",
    "data.normalise.mean": "silent; the authors' code has [-1, 1]",
    "ema.decay": "0.9999, for ImageNet at 512 and 518 pixels (section 4.1)",
    "evaluation.fewshot.l2": "regularised regression to targets of -1 and 1 (section 4.1), with no figure",
    "init.head": "a layer of zeros in place of the head (section 3.2, appendix B.1.1)",
    "init.positions": "2D interpolation (section 3.2)",
    "model.attention": "axial attention (appendix D.5)",
    "model.blocks": "hybrids (sections 3.1 and 4.1)",
    "model.depth": "12, 24, 32 of B, L, H (Table 1); other depths in appendix D.2",
    "model.dropout": "0 on JFT, 0.1 on ImageNet and ImageNet-21k (Table 3)",
    "model.head": "one hidden layer to pre-train, a single layer to fine-tune (section 3.1)",
    "model.head_bias": "silent; the authors' code has -10 to pre-train",
    "model.mlp_dim": "3,072, 4,096, 5,120 of B, L, H (Table 1)",
    "model.num_heads": "12, 16, 16 of B, L, H (Table 1)",
    "model.patch_size": "14, 16, 32 (section 4.1); as a dimension to scale in appendix D.2",
    "model.position.at": "Table 8 (appendix D.3)",
    "model.position.kind": "Table 8 (appendix D.3); 1d everywhere else",
    "model.width": "768, 1,024, 1,280 of B, L, H (Table 1)",
    "objective.loss": "silent; the authors' code pre-trains with sigmoid and fine-tunes with softmax",
    "objective.share": "50 % (appendix B.1.2); 15 % was slightly worse",
    "objective.target": "three were tried, mean_colour reported (appendix B.1.2)",
    "optimizer.betas": "0.9 and 0.999 (section 4.1)",
    "optimizer.clip_norm": "1 on ImageNet (Table 3) and to fine-tune (Table 4)",
    "optimizer.lr": "2e-4 to 3e-3 to pre-train (Table 3), 0.001 to 0.06 to fine-tune (Table 4)",
    "optimizer.momentum": "0.9 to fine-tune, with SGD (appendix B.1.1)",
    "optimizer.name": "Adam to pre-train (section 4.1, appendix D.1), SGD with momentum to fine-tune (appendix B.1.1)",
    "optimizer.weight_decay": "0.1 on JFT, 0.03 on ImageNet-21k, 0.3 on ImageNet (Table 3), 0 to fine-tune (Table 4)",
    "schedule.decay": "linear, on ImageNet cosine (Table 3); cosine to fine-tune (Table 4)",
    "schedule.duration": "7, 14, 30, 90 or 300 epochs (Table 3); 500 to 20,000 steps to fine-tune (Table 4)",
    "schedule.end_lr": "silent; the authors' code has 1e-5",
    "schedule.warmup": "10,000 steps to pre-train (Table 3)",
    "selection.patience": "early stopping on subsets of JFT (section 4.3), with no figure",
}
"""Key -> what "An Image is Worth 16x16 Words" says about the field, and where."""


class Notes(NamedTuple):
    """The notes on one field; None where there is nothing to say."""

    unit: str | None
    touches: str | None
    paper: str | None
    resuming: str


def notes(key: str) -> Notes:
    """The notes on a field, by its dotted key with N for an index; those of a teacher and a view are shared."""
    told = key.replace("objective.teacher.model.", "model.").replace("objective.teacher.normalise.", "data.normalise.")
    told = told if told in _UNITS else told.replace("data.views.N.", "data.")
    if _is_in(key, FREE_ON_RESUME):
        resuming = "a resumed run may change it"
    elif _is_in(key, FREE_ON_BRANCHING):
        resuming = "a resumed run keeps it; a branch (init.continue) may change it"
    else:
        resuming = "a resumed run keeps it: another value is another run"
    return Notes(_UNITS.get(told), _TOUCHES.get(told), _PAPERS.get(told), resuming)


def noted_keys() -> set[str]:
    """All keys with a note."""
    return {*_UNITS, *_TOUCHES, *_PAPERS}


def _is_in(key: str, free: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{each}.") for each in free)
