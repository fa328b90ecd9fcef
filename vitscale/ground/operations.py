"""The operations of a model: the cost of each for one image, and its parameters.

Costs are the multiply-adds (MACs) of matrix products and convolutions. Biases, norms, softmax, activations, pooling,
residual sums and the standardisation of convolutions' weights are not counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Operation:
    """One matrix product or convolution, or parameters that are only added or scaled with.

    Args:
        part: the part of the model, for breakdowns: `mlp`, `stage2`.
        macs: MACs of the forward pass, with taps on zero padding, as torch, fvcore and timm count.
        accounting_macs: the same without taps on zero padding, as the paper's exaFLOPs are counted (see `accounting`).
        params: the number of parameters, biases included.
        input_gradient: whether the backward pass needs the gradient of the input as well; the images need none.
        recomputed_in: the index of the block for whose recomputation in the backward pass (activation checkpointing)
            this operation is done once more; None if it never is.
        is_trained: whether there is a backward pass; a teacher has none.
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
        """MACs of the gradients of both factors, or of the weights alone, with taps on zero padding."""
        if not self.is_trained:
            return 0
        return 2 * self.macs if self.input_gradient else self.macs


def block_of(operations: Iterable[Operation], index: int, *, needs_output: bool) -> list[Operation]:
    """The operations of one block, in order, marked as activation checkpointing recomputes them.

    Recomputing stops with the last activation that the backward pass needs. Unless that is the output of the last
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
    """Parameters that are added, or scale a norm; they cost no MACs."""
    return Operation(part, 0, 0, count)


def convolution(
    part: str, size: int, inputs: int, outputs: int, kernel_size: int, stride: int = 1, *, input_gradient: bool = True
) -> Operation:
    """A square convolution without bias over `size` x `size` positions; its output has ceil(size / stride) a side."""
    weights = inputs * outputs
    side = -(-size // stride) * kernel_size
    inside = taps_inside(size, kernel_size, stride)
    return Operation(part, side**2 * weights, inside**2 * weights, kernel_size**2 * weights, input_gradient)


def taps_inside(size: int, kernel_size: int, stride: int) -> int:
    """The number of kernel taps that fall inside the input, along one axis and over all outputs.

    Padding is kernel_size // 2 before the first position. 'SAME' padding with a stride of 2 is the mirror image of
    this, so the number is the same.
    """
    starts = range(-(kernel_size // 2), size - kernel_size // 2, stride)
    return sum(min(start + kernel_size, size) - max(start, 0) for start in starts)
