"""The operations of a model: what each costs for one image, and the parameters it holds.

Counted are the multiply-adds (MACs) of matrix products and convolutions. Not counted: biases, norms, softmax,
activations, pooling, residual sums, the standardisation of convolutions' weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Operation:
    """One matrix product or convolution, or parameters that are only added or scaled with.

    Args:
        part: of the model, for a breakdown: `mlp`, `stage2`.
        macs: of the forward pass, taps on zero padding counted, as torch, fvcore and timm count.
        accounting_macs: without the taps on zero padding; the paper's exaFLOPs are counted so (see `accounting`).
        params: parameters, biases included.
        input_gradient: whether the backward pass needs the gradient of the input as well. The images need none.
        is_trained: whether there is a backward pass; a teacher has none.
        recomputed_in: the index of the block whose activations, recomputed in the backward pass, take this operation
            once more; None where that never happens.
    """

    part: str
    macs: int
    accounting_macs: int
    params: int
    input_gradient: bool = True
    recomputed_in: int | None = None
    is_trained: bool = True

    @property
    def backward_macs(self) -> int:
        """MACs of the gradients of both factors, or of the weights alone; padding counted."""
        if not self.is_trained:
            return 0
        return 2 * self.macs if self.input_gradient else self.macs


def block_of(operations: Iterable[Operation], index: int, *, needs_output: bool) -> list[Operation]:
    """The operations of one block, in order, as activation checkpointing takes them.

    Recomputing stops with the last activation that the backward pass needs. Where that is not the output of the last
    matrix product (`needs_output`), this product is not computed again.
    """
    marked = [replace(operation, recomputed_in=index) for operation in operations]
    if not needs_output:
        last = max(position for position, operation in enumerate(marked) if operation.macs)
        marked[last] = replace(marked[last], recomputed_in=None)
    return marked


def dense(
    part: str, rows: int, inputs: int, outputs: int, *, bias: bool = True, input_gradient: bool = True
) -> Operation:
    """A dense layer over `rows` positions of one image."""
    macs = rows * inputs * outputs
    return Operation(part, macs, macs, inputs * outputs + (outputs if bias else 0), input_gradient)


def product(part: str, macs: int, params: int = 0) -> Operation:
    """Matrix products of activations with one another, or with `params` embeddings."""
    return Operation(part, macs, macs, params)


def parameters(part: str, count: int) -> Operation:
    """Parameters that are added, or scale a norm: no MACs."""
    return Operation(part, 0, 0, count)


def convolution(
    part: str, size: int, inputs: int, outputs: int, kernel_size: int, stride: int = 1, *, input_gradient: bool = True
) -> Operation:
    """A square convolution without bias over `size` x `size` positions, whose output is ceil(size / stride) a side."""
    weights = inputs * outputs
    side = -(-size // stride) * kernel_size
    inside = taps_inside(size, kernel_size, stride)
    return Operation(part, side**2 * weights, inside**2 * weights, kernel_size**2 * weights, input_gradient)


def taps_inside(size: int, kernel_size: int, stride: int) -> int:
    """Along one axis, over all outputs, the taps of the kernel that fall inside the input.

    Padding is kernel_size // 2 before the first position. 'SAME' padding with a stride of 2 is its mirror image, and
    so the same number.
    """
    starts = range(-(kernel_size // 2), size - kernel_size // 2, stride)
    return sum(min(start + kernel_size, size) - max(start, 0) for start in starts)
