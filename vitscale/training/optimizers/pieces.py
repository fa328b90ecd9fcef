"""Where a parameter lies in the tensors that a rank's optimizer updates."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of one parameter in this rank's optimizer: elements [start, start + length), at `offset` of `flat`."""

    name: str
    start: int
    length: int
    flat: Tensor
    offset: int

    def view(self, tensor: Tensor) -> Tensor:
        """The same part, 1-D, of a tensor that is laid out as `flat`."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.length)

    def of_gradient(self) -> Tensor:
        """The same part of the gradient, which must exist."""
        assert self.flat.grad is not None
        return self.view(self.flat.grad)
