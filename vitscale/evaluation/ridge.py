"""Few-shot accuracy in closed form: ridge regression from frozen features to +-1 class targets (paper section 4.1).

Everything is float64 on the features' device: with one feature of 100 among whitened ones and an l2 as small as 2^-10,
the fp32 normal equations are short of digits, and the systems (at most D + 1 = 1,281 wide for ViT-H) are small.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BIAS_FEATURE = 100.0
"""A constant feature in place of an intercept, so large that the regularisation hardly touches its weight."""

_STD_FLOOR = 1e-5


def fewshot_accuracy(
    train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, num_classes: int, l2s: Sequence[float]
) -> list[float]:
    """Test accuracy (a fraction) for each regularisation strength in `l2s`.

    Features are whitened by the training samples' mean and standard deviation. All strengths share one
    eigendecomposition, of the smaller of the feature (primal) and the sample (dual) matrix.

    Args:
        train_x, test_x: features, (N, D) and (M, D).
        train_y, test_y: classes in [0, num_classes), (N,) and (M,) int64.
    """
    train_x, test_x = train_x.double(), test_x.double()
    mean = train_x.mean(dim=0)
    std = train_x.std(dim=0, correction=0) + _STD_FLOOR
    train_x, test_x = _with_bias((train_x - mean) / std), _with_bias((test_x - mean) / std)
    targets = 2.0 * torch.nn.functional.one_hot(train_y, num_classes).double() - 1.0

    # Weights are left @ diag(1 / (eigenvalues + l2)) @ right.
    if train_x.shape[0] >= train_x.shape[1]:
        eigenvalues, basis = torch.linalg.eigh(train_x.T @ train_x)
        left, right = basis, basis.T @ (train_x.T @ targets)
    else:
        eigenvalues, basis = torch.linalg.eigh(train_x @ train_x.T)
        left, right = train_x.T @ basis, basis.T @ targets
    eigenvalues = eigenvalues.clamp(min=0)  # rounding leaves those of a singular matrix around zero, on either side
    projected = test_x @ left
    return [
        float(((projected @ (right / (eigenvalues + l2)[:, None])).argmax(dim=1) == test_y).double().mean())
        for l2 in l2s
    ]


def _with_bias(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 1), value=BIAS_FEATURE)


def best_shared_l2(accuracies: Tensor) -> int:
    """Index of the regularisation strength with the best mean rank over data sets: (datasets, l2s) -> int.

    The paper-era choice: one strength shared by all data sets, so that none is fitted to its own test set alone.
    Equal accuracies share their mean rank; between equal mean ranks the smaller index wins.
    """
    below = (accuracies[:, None, :] < accuracies[:, :, None]).sum(dim=2)
    equal = (accuracies[:, None, :] == accuracies[:, :, None]).sum(dim=2)
    mean_rank = (below + equal / 2).double().mean(dim=0)
    return int(mean_rank.argmax())
