"""Kernels and bytes of a compiled encoder block, forward and backward, without a GPU, and the MFU that follows.

    PYTHONPATH=TRITON python benchmarks/step_traffic.py [--model ViT-H/14] [--batch 128] [--tokens 257]
                                                        [--accumulation 1] [--update-bytes 50] [--json]

Needs triton, which torch's wheels for CPUs come without (`pip install --target TRITON triton==3.9.0` for torch 2.13).
Inductor writes the block's kernels for CUDA as it would on an H100, told the properties of one, and counts each
kernel's bytes itself; nothing is run. A change that adds a pass over the activations shows at once. Contenders: `ours`,
with bf16 weights, compiled as training compiles it; `timm`, timm's block as people train it: fp32 weights and residual
stream under bf16 autocast. Products and attention are calls of libraries: they are no kernels here, and their bytes are
not counted. Attention is called as on CPUs, with the same tensors.

The MFU is a prediction, by parts: products and attention at the rates below, the kernels' bytes at the rate of memory,
2 us for a kernel, and the optimizer's update. What lies before and after the blocks is left out. No rate was measured
by us. Fails where our block moves more than its goal.
"""

import argparse
import contextlib
import importlib.util
import json
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn

from vitscale.flops.accounting import training_flops_per_image
from vitscale.flops.hardware import find_device
from vitscale.flops.work import recipe_work
from vitscale.models import compile_blocks
from vitscale.models.vit import ViT
from vitscale.recipe import validate_recipe
from vitscale.recipe.families import ViTShape, architecture

MOST_BYTES = {("ViT-H/14", 128, 257): {"ours": 4.83e9}}
PRODUCTS = 690e12  # FLOP/s in bf16, both cards; 798 and 788 are published for 8192 x 8192 x 8192 on an H100 and an H200
ATTENTION = 223e12  # FLOP/s of cuDNN's, forward and backward, its recomputation counted: an estimate
MEMORY = {"h100": 2.7e12, "h200": 3.87e12}  # bytes/s: 0.8 of the datasheets
KERNEL = 2e-6  # seconds that a kernel takes whatever its size
PARTS = ("products", "attention", "elementwise", "update")
LEAST_MFU = {("ViT-H/14", 257): 0.52, ("ViT-H/14", 256): 0.54}  # the goals of train_step.py

_H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


class _WrittenError(Exception):
    """Ends Inductor's work where it would run the code that it has written."""


# ---- The graphs of a block -------------------------------------------------------------------------------------------


def graphs_of(shape: ViTShape, who: str, batch: int, tokens: int) -> dict[str, tuple[Any, Sequence[Any]]]:
    """The forward and the backward pass of one block as Inductor gets them, each with its inputs."""
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode

    met: list[tuple[Any, Sequence[Tensor]]] = []
    found: dict[str, tuple[Any, Sequence[Any]]] = {}

    def note(graph: Any, inputs: Sequence[Tensor]) -> Callable:
        met.append((graph, inputs))
        return graph.forward

    def keep(name: str) -> Callable:
        def compiler(graph: Any, inputs: Sequence[Any]) -> Callable:
            found[name] = (graph, inputs)
            return graph.forward

        return compiler

    with torch.device("meta"):
        block = make_block(shape, who, note)
        dtype = torch.float32 if who == "timm" else torch.bfloat16
        tokens_BTD = torch.empty(batch, tokens, shape.width, dtype=dtype, requires_grad=True)
    block(tokens_BTD)
    (graph, inputs) = met[0]
    autocast = torch.autocast("cpu", torch.bfloat16) if who == "timm" else contextlib.nullcontext()
    # On CPUs' fake tensors, as autograd asks for a device, and this torch may have been built without CUDA.
    with FakeTensorMode():
        fakes = [torch.empty(each.shape, dtype=each.dtype, requires_grad=each.requires_grad) for each in inputs]
    with autocast, config.patch(force_non_lazy_backward_lowering=True):
        aot_module_simplified(
            graph,
            fakes,
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
    return found


def make_block(shape: ViTShape, who: str, backend: Callable) -> nn.Module:
    """A block that gives its graph to a backend of torch.compile."""
    if who != "timm":
        model = ViT(shape, image_size=shape.patch_size, num_classes=None).to(torch.bfloat16)
        compile_blocks(model.units(), backend)
        return model.blocks[0]
    from timm.models.vision_transformer import Block

    make: Any = Block  # whose annotation of `act_layer` is narrower than what it takes
    gelu = partial(nn.GELU, "tanh")
    block: nn.Module = make(shape.width, shape.num_heads, shape.mlp_dim / shape.width, qkv_bias=True, act_layer=gelu)
    block.compile(fullgraph=True, dynamic=False, backend=backend)
    return block


# ---- Inductor's code for CUDA ----------------------------------------------------------------------------------------


def code_for_cuda(name: str, graph: Any, inputs: Sequence[Any]) -> str:
    """What Inductor writes for the graph on an H100."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx, config, exc
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode, written = FakeTensorMode(), []

    def stop(_: Any, code: Any) -> None:
        written.append(code.value)
        raise _WrittenError

    with mode:
        there = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda:0")
            if isinstance(each, Tensor)
            else each
            for each in inputs
        ]
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*there)
    with (
        _an_h100(stop),
        config.patch(benchmark_kernel=True, fx_graph_cache=False),
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
    ):
        try:
            compile_fx.compile_fx_inner(graph, there, is_backward=name == "backward")
        except exc.InductorError:
            if not written:
                raise
    return str(written[0])


@contextlib.contextmanager
def _an_h100(stop: Callable) -> Iterator[None]:
    """Answers for an H100 to what Inductor asks while it writes code, and `stop` where it would run it."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.graph import GraphLowering

    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", _H100),
        (torch.cuda, "get_device_capability", (9, 0)),
        (torch.cuda, "device_count", 1),
        (torch.cuda, "current_device", 0),
        (CudaInterface, "get_device_properties", _H100),
        (CudaInterface.Worker, "get_device_properties", _H100),
        (CudaInterface, "is_available", True),
        (CudaInterface, "is_bf16_supported", True),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(patch.object(owner, name, staticmethod(lambda *_, answer=answer, **__: answer)))
        stack.enter_context(patch("torch._inductor.scheduler.has_triton", lambda: True))
        stack.enter_context(patch("torch.utils._triton.triton_hash_with_backend", lambda: ""))
        stack.enter_context(patch.object(GraphLowering, "_compile_to_module_lines", stop))
        yield


def own_kernels(graph: Any) -> list[tuple[str, int]]:
    """Our own kernels in a graph, which Inductor does not look into, each with the bytes of what it reads and writes.

    Not counted are the partial sums that GELU's writes and reads: 5 MB a block of ViT-H/14 with 128 images.
    """
    found = []
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", "") == "vitscale":
            values = [each.meta["val"] for each in node.all_input_nodes] + list(node.meta["val"])
            found.append((node.target.name(), sum(each.numel() * each.element_size() for each in values)))
    return found


def traffic(code: str, own: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """The kernels that a module of Inductor's runs, each with its bytes, and how often it calls libraries.

    Args:
        own: kernels to add to Inductor's.
    """
    sizes = {
        name: 1e9 * float(size)
        for name, size in re.findall(r"'kernel_name': '(\w+)'[^\n]*'kernel_num_gb': ([0-9.e-]+)", code)
    }
    calls = code.split("\nclass Runner:")[1].split("\ndef get_args")[0]
    kernels = [(name, sizes[name]) for name in re.findall(r"^\s+(triton_\w+)\.run\(", calls, re.MULTILINE)] + [*own]
    libraries = Counter(re.findall(r"(?:extern_kernels\.|= torch\.ops\.\w+\.)(\w+)", calls))
    return {"bytes": sum(size for _, size in kernels), "kernels": kernels, "libraries": dict(libraries)}


# ---- The prediction --------------------------------------------------------------------------------------------------


def predicted(options: argparse.Namespace, shape: ViTShape, moved: float, kernels: int) -> dict[str, dict[str, float]]:
    """Milliseconds of an image by part, images/s and MFU on each card, with so many bytes and kernels in a block."""
    pool: Literal["mean", "cls"] = "mean" if options.tokens == shape.grid(224) ** 2 else "cls"
    content: dict[str, Any] = {
        "model": {"name": options.model, "pool": pool, "head": "linear", "num_classes": 1000},
        "data": {"train": "train", "image_size": 224},
        "batch": {"global": options.batch},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "schedule": {"duration": {"steps": 1}},
    }
    flops = training_flops_per_image(recipe_work(validate_recipe(content, "traffic"), 1000).macs)
    with torch.device("meta"):
        model = ViT(shape, image_size=224, num_classes=1000, pool=pool, head="linear")
    parameters = sum(each.numel() for each in model.parameters())
    attention = 12 * options.tokens**2 * shape.width * shape.depth  # without the recomputation of its backward pass
    found = {}
    for card, rate in MEMORY.items():
        parts = {
            "products": (flops - attention) / PRODUCTS,
            "attention": 3.5 / 3 * attention / ATTENTION,
            "elementwise": shape.depth * (moved / rate + kernels * KERNEL) / options.batch,
            "update": options.update_bytes * parameters / rate / options.batch / options.accumulation,
        }
        speed = 1 / sum(parts.values())
        milliseconds = {name: 1e3 * seconds for name, seconds in parts.items()}
        found[card] = {**milliseconds, "images_per_s": speed, "mfu": speed * flops / find_device(card).peak["bf16"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-H/14")
    parser.add_argument("--batch", type=int, default=128, help="images of a micro-batch")
    parser.add_argument("--tokens", type=int, default=257)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of an update")
    parser.add_argument("--update-bytes", type=float, default=50, help="bytes of an update, for each parameter")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        raise SystemExit(
            "step_traffic needs triton, which torch's wheels for CPUs come without: pip install --target TRITON "
            "triton==3.9.0 (for torch 2.13), and run again with PYTHONPATH=TRITON"
        )
    shape = architecture(options.model)
    assert isinstance(shape, ViTShape), "only Vision Transformers have such blocks"
    results: dict[str, Any] = {}
    for who in ("ours", "timm"):
        graphs = graphs_of(shape, who, options.batch, options.tokens)
        results[who] = {
            name: traffic(code_for_cuda(name, *graph), own_kernels(graph[0])) for name, graph in graphs.items()
        }
    totals = {who: sum(part["bytes"] for part in passes.values()) for who, passes in results.items()}
    kernels = {who: sum(len(part["kernels"]) for part in passes.values()) for who, passes in results.items()}
    cards = {who: predicted(options, shape, totals[who], kernels[who]) for who in results}
    ratio = totals["ours"] / totals["timm"]
    if options.json:
        print(json.dumps({"bytes": totals, "ratio": ratio, "passes": results, "predicted": cards}))
    else:
        title = f"{options.model}, {options.batch} images, {options.tokens} tokens"
        print(f"{title}: bytes of a block by timm's {ratio:.3f}")
        for who, passes in results.items():
            by_pass = ", ".join(
                f"{name} {part['bytes'] / 1e9:.3f} GB in {len(part['kernels'])}" for name, part in passes.items()
            )
            print(f"  {who:5} {totals[who] / 1e9:.3f} GB in {kernels[who]} kernels: {by_pass}")
        for name, size in (each for part in results["ours"].values() for each in part["kernels"]):
            print(f"    {size / 1e6:8.1f} MB  {name}")
        goal = LEAST_MFU.get((options.model, options.tokens))
        print("predicted, ms an image; never measured" + (f"; the goal is an MFU of {goal:.0%}" if goal else ""))
        for who, of_card in cards.items():
            for card, one in of_card.items():
                parts = "  ".join(f"{part} {one[part]:.3f}" for part in PARTS)
                print(f"  {who:5} {card}  {parts}  {one['images_per_s']:4.0f} images/s  MFU {one['mfu']:.1%}")
        print(
            f"at {PRODUCTS / 1e12:.0f} TFLOP/s for products, {ATTENTION / 1e12:.0f} for attention, "
            + ", ".join(f"{rate / 1e12:g} TB/s ({card})" for card, rate in MEMORY.items())
            + f", {KERNEL * 1e6:g} us a kernel, {options.update_bytes:g} B a parameter for an update"
        )
    for who, most in MOST_BYTES.get((options.model, options.batch, options.tokens), {}).items():
        if totals[who] > most:
            raise SystemExit(f"missed: at most {most / 1e9:.2f} GB a block ({who})")


if __name__ == "__main__":
    main()
