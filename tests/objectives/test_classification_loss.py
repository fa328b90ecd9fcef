"""The two losses against torch's own, given the same targets as a matrix."""

import math

import pytest
import torch
from torch.nn import functional as F

from vitscale.ground.errors import DataError
from vitscale.objectives.classification import CrossEntropy, sigmoid_cross_entropy, softmax_cross_entropy

B, K = 7, 13
SMOOTHINGS = [(1.0, 0.0), (0.9999, 0.0001), (0.9, 0.1 / (K - 1)), (0.8, 0.05)]


def example(dtype=torch.float32, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(B, K, generator=generator) - 5).to(dtype).requires_grad_(requires_grad)
    return logits, torch.randint(0, K, (B,), generator=generator)


def target_matrix(labels, on, off):
    return off + (on - off) * F.one_hot(labels % (K + 1), K + 1)[:, :K]  # -1 has a class of its own


def reference(loss, logits, targets):
    if loss == "sigmoid":
        return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").sum(dim=1)
    return F.cross_entropy(logits.float(), targets, reduction="none")


@pytest.mark.parametrize("loss", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("on", "off"), SMOOTHINGS)
def test_values_and_gradients_equal_torch(loss, on, off):
    logits, labels = example(requires_grad=True)
    if loss == "sigmoid":
        labels[2] = -1  # no label: all targets are off
    ours = CrossEntropy(loss, on, off).per_sample_loss(logits, labels)
    (our_gradient,) = torch.autograd.grad(ours.sum(), logits)
    theirs = reference(loss, logits, target_matrix(labels, on, off))
    (their_gradient,) = torch.autograd.grad(theirs.sum(), logits)
    assert ours.shape == (B,) and ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cross_entropy", [sigmoid_cross_entropy, softmax_cross_entropy])
def test_bf16_logits_are_summed_in_fp32(cross_entropy):
    logits, labels = example(torch.bfloat16)
    shares = [(labels, 1.0)]
    assert torch.equal(cross_entropy(logits, shares), cross_entropy(logits.float(), shares))


@pytest.mark.parametrize("cross_entropy", [sigmoid_cross_entropy, softmax_cross_entropy])
def test_extreme_logits_stay_finite(cross_entropy):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]], requires_grad=True)
    loss = cross_entropy(logits, [(torch.tensor([0, 0]), 1.0)])
    expected = torch.tensor([0.0, 2e4]) + (math.log(2) if cross_entropy is sigmoid_cross_entropy else 0.0)
    torch.testing.assert_close(loss, expected, rtol=0, atol=2e-3)  # one unit in the last place of 1e4 is 1e-3
    assert torch.autograd.grad(loss.sum(), logits)[0].isfinite().all()


def test_a_softmax_sample_without_label_is_nan_and_only_that_one():
    logits, labels = example()
    labels[2] = -1
    assert CrossEntropy("softmax").per_sample_loss(logits, labels).isnan().nonzero().tolist() == [[2]]


def test_labels_are_checked_on_the_host():
    sigmoid, softmax = CrossEntropy("sigmoid"), CrossEntropy("softmax")
    sigmoid.check_labels(torch.tensor([-1, 0, K - 1]), K)
    softmax.check_labels(torch.tensor([0, K - 1]), K)
    with pytest.raises(DataError, match=r"\b1 of 2\b.*-1\.\.12.*\b13\b"):
        sigmoid.check_labels(torch.tensor([0, K]), K)
    with pytest.raises(DataError, match="softmax"):
        softmax.check_labels(torch.tensor([0, -1]), K)
