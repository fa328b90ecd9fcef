"""Builds the model of a recipe."""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from vitscale import recipe as recipes
from vitscale.ground.extensions import implementation
from vitscale.ground.files.machine_folder import choose_code_folder
from vitscale.models.model import Model
from vitscale.recipe import families


def weight_dtype(recipe: recipes.Recipe) -> torch.dtype:
    """The dtype of the weights that a recipe's model computes with; its precision must no longer be `auto`."""
    assert recipe.precision != "auto", "which precision auto is depends on a device: see beginning/automatic.py"
    return torch.float32 if recipe.precision == "fp32" else torch.bfloat16


def build_model(recipe: recipes.Recipe, num_classes: int | None) -> Model:
    """The recipe's model, its values unset, on whatever device and dtype the context makes tensors.

    Without `num_classes` it has no head.
    """
    return build_of_block(
        recipe.model,
        image_size=recipe.data.image_size,
        num_classes=num_classes,
        checkpoint_every=recipe.parallelism.activation_checkpointing,
    )


def build_of_block(
    block: families.Model, *, image_size: int, num_classes: int | None, checkpoint_every: int = 0
) -> Model:
    """The model of a recipe's `model` block. Raises `RecipeError` if its family's package is not installed."""
    family = implementation(block.implementation, Model)
    return family.of(block, image_size=image_size, num_classes=num_classes, checkpoint_every=checkpoint_every)


def compile_blocks(
    blocks: Sequence[nn.Module], backend: str | Callable[..., Any] = "inductor", activation_budget: float | None = None
) -> None:
    """Have torch compile each of a model's `units` by itself, once for all that are alike; names stay as they are.

    Only their `forward` is compiled, so that hooks of a block, such as waiting for its weights, run outside of the
    graph; hooks of modules within it do not run. Shapes are static: another batch size compiles anew. `backend` is
    torch.compile's. `activation_budget` is the share of activations that blocks keep for the backward pass, in (0, 1];
    None leaves that to torch.
    """
    from torch._dynamo import config  # imported only to compile: it takes a second
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    choose_code_folder("TORCHINDUCTOR_CACHE_DIR")  # torch's own choice in /tmp may be another user's; Triton's is in it

    # Torch's cache of compiled code does not ask for which processor it is. Loops for vectors of another width write
    # beyond their tensors; the machine that uses a folder may change overnight, and on a cluster from node to node.
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += capability
    if activation_budget is not None:
        functorch_config.activation_memory_budget = activation_budget
    inductor_config.triton.mix_order_reduction = False  # saves nothing in our blocks; was wrong in torch 2.10
    # Torch counts by code, which blocks share. Units differ in shape, and each has one shape in training. Where a pass
    # without gradients goes first, that is compiled besides.
    config.recompile_limit = max(config.recompile_limit, 2 * len(blocks) + 8)
    for block in blocks:
        forward = torch.compile(type(block).forward, fullgraph=True, dynamic=False, backend=backend)
        block.forward = MethodType(forward, block)  # as a method it is bound anew when the block is copied


def is_compiled(module: nn.Module) -> bool:
    """Whether `compile_blocks` has compiled the module, with all within it."""
    return "forward" in vars(module)
