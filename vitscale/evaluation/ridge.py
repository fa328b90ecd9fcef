"""Few-shot accuracy in closed form: ridge regression from frozen features to +-1 class targets (paper section 4.1).

Everything is float64 on the features' device: with one feature of 100 among whitened ones and an l2 as small as 2^-10,
fp32 normal equations lack digits, and the systems are small (at most D + 1 = 1,281 wide for ViT-H).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitscale.evaluation.probes import Splits

BIAS_FEATURE = 100.0
"""A constant feature in place of an intercept, so large that the regularisation hardly touches its weight."""

_STD_FLOOR = 1e-5
_CHUNK = 8192  # rows in float64 at a time


class RidgePath:
    """Ridge regressions of one set of features on +-1 class targets, for every regularisation strength.

    Features are whitened by the training samples' mean and standard deviation. All strengths share one
    eigendecomposition, of the smaller of the feature (primal) and the sample (dual) matrix. Weights are
    `left @ diag(1 / (eigenvalues + l2)) @ right`. Besides the given features (N, D) it holds some thousand rows in
    float64 and matrices (D + 1) x (D + 1) and (D + 1) x K in memory.
    """

    def __init__(self, x: Tensor, y: Tensor, num_classes: int) -> None:
        self._mean = sum(rows.double().sum(dim=0) for rows in x.split(_CHUNK)) / len(x)
        squares = sum((rows.double() - self._mean).square().sum(dim=0) for rows in x.split(_CHUNK))
        self._std = (squares / len(x)).sqrt() + _STD_FLOOR
        if len(x) > x.shape[1]:
            width = x.shape[1] + 1
            gram = x.new_zeros(width, width, dtype=torch.float64)
            of_classes = x.new_zeros(num_classes, width, dtype=torch.float64)
            for rows, labels in zip(x.split(_CHUNK), y.split(_CHUNK), strict=True):
                white = self.whitened(rows)
                gram += white.T @ white
                of_classes.index_add_(0, labels, white)
            eigenvalues, basis = torch.linalg.eigh(gram)
            # Targets are 1 for a sample's class and -1 for the others.
            targets = 2 * of_classes.T - of_classes.sum(dim=0)[:, None]
            self._left, self._right = basis, basis.T @ targets
        else:
            white = self.whitened(x)
            eigenvalues, basis = torch.linalg.eigh(white @ white.T)
            targets = 2.0 * torch.nn.functional.one_hot(y, num_classes).double() - 1.0
            self._left, self._right = white.T @ basis, basis.T @ targets
        # Rounding leaves the eigenvalues of a singular matrix around zero, on either side.
        self._eigenvalues = eigenvalues.clamp(min=0)

    def whitened(self, x: Tensor) -> Tensor:
        """Whitened features with the constant one added: (N, D) -> float64 (N, D + 1)."""
        return torch.nn.functional.pad((x.double() - self._mean) / self._std, (0, 1), value=BIAS_FEATURE)

    def weights(self, l2: float) -> Tensor:
        """The weights for whitened features at one strength, float64 (D + 1, K)."""
        return self._left @ self._scaled(l2)

    def accuracies(self, x: Tensor, y: Tensor, l2s: Sequence[float]) -> list[float]:
        """For each strength, the accuracy (a fraction) on features (M, D) and classes (M,)."""
        right = [0] * len(l2s)
        for rows, labels in zip(x.split(_CHUNK), y.split(_CHUNK), strict=True):
            projected = self.whitened(rows) @ self._left
            for at, l2 in enumerate(l2s):
                right[at] += int(((projected @ self._scaled(l2)).argmax(dim=1) == labels).sum())
        return [count / len(x) for count in right]

    def _scaled(self, l2: float) -> Tensor:
        return self._right / (self._eigenvalues + l2)[:, None]


def fewshot_accuracy(splits: Splits, l2s: Sequence[float]) -> list[float]:
    """Test accuracy (a fraction) for each regularisation strength in `l2s`; see `RidgePath`."""
    return RidgePath(splits.train_x, splits.train_y, splits.num_classes).accuracies(splits.test_x, splits.test_y, l2s)


def best_shared_l2(accuracies: Tensor, leave_out: int | None = None) -> int:
    """The index of the regularisation strength with the best mean rank over datasets: (datasets, l2s) -> int.

    The choice made at the paper's time: all datasets share one strength, so that none is fitted to its own test set
    alone. `leave_out` is the index of a dataset whose ranks are ignored. Equal accuracies share their mean rank;
    between equal mean ranks the smaller index wins.
    """
    if leave_out is not None:
        accuracies = torch.cat([accuracies[:leave_out], accuracies[leave_out + 1 :]])
    below = (accuracies[:, None, :] < accuracies[:, :, None]).sum(dim=2)
    equal = (accuracies[:, None, :] == accuracies[:, :, None]).sum(dim=2)
    return int((below + equal / 2).double().mean(dim=0).argmax())
