"""Weighted nearest neighbours, as DINO measures representations (Caron et al. 2021).

Shape legend: N training samples, M test samples, D width, K classes.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

NEIGHBOURS = (10, 20, 100, 200)
TEMPERATURE = 0.07
_CHUNK = 1024


def neighbour_accuracies(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    num_classes: int,
    neighbours: Sequence[int] = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> dict[int, float]:
    """k -> test accuracy (a fraction) with k neighbours; numbers larger than N are left out.

    The k training samples with the highest cosine similarity vote for their classes with exp(similarity / temperature).

    Args:
        train_x, test_x: features, (N, D) and (M, D).
        train_y, test_y: classes in [0, num_classes), int64 (N,) and (M,).
        num_classes: K.
        neighbours: the numbers of neighbours k.
    """
    counts = sorted({k for k in neighbours if k <= len(train_x)})
    if not counts:
        return {}
    known, right = F.normalize(train_x.float(), dim=1), dict.fromkeys(counts, 0)
    for rows, labels in zip(test_x.split(_CHUNK), test_y.split(_CHUNK), strict=True):
        similarity, nearest = (F.normalize(rows.float(), dim=1) @ known.T).topk(counts[-1], dim=1)
        weights, voted = (similarity / temperature).double().exp(), train_y[nearest]
        for k in counts:
            votes = weights.new_zeros(len(rows), num_classes).scatter_add_(1, voted[:, :k], weights[:, :k])
            right[k] += int((votes.argmax(dim=1) == labels).sum())
    return {k: count / len(test_x) for k, count in right.items()}
