"""The bank of linear heads against torch's own layers, optimiser and schedule."""

import pytest
import torch
from models.small_models import with_values
from models.weights.exported import TINY, described, valued
from torch import nn
from toy_split import train_plainly

from vitscale.evaluation.features import extract_features
from vitscale.evaluation.finished import FinishedModel, OfWeights
from vitscale.evaluation.heads import (
    Head,
    Layout,
    accuracy,
    bank_of,
    best_of_bank,
    extract_blocks,
    logits_of,
    train_heads,
)
from vitscale.evaluation.probes import Splits

K, D = 4, 6
LAYOUT = Layout(blocks=4, width=D, has_patches=True)


def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, K, (count,), generator=generator)
    centres = torch.randn(K, 5 * D, generator=torch.Generator().manual_seed(7))
    return centres[y] + 1.5 * torch.randn(count, 5 * D, generator=generator), y


def plain_loop(x, y, rate, steps, seed):
    """One head as anybody would train it."""
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(x.shape[1], K)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * 0.01)
        head.bias.zero_()
    optimizer = torch.optim.SGD(head.parameters(), lr=rate, momentum=0.9)
    train_plainly(head, optimizer, x, y, steps, seed)
    return head.weight.detach(), head.bias.detach()


def accuracy_of(head, values, x, y):
    return accuracy(lambda rows: logits_of(LAYOUT, head, values, rows), x, y, torch.arange(len(x)))


def test_every_head_is_what_a_plain_loop_trains():
    x, y = samples(300, seed=1)
    heads = [Head(1, False, 0.01), Head(1, False, 0.1), Head(4, True, 0.001), Head(4, True, 0.1)]
    for head, (weight, bias) in zip(heads, train_heads(x, y, K, heads, LAYOUT, steps=30, seed=3), strict=True):
        # The columns are: mean of the patches, then the blocks' tokens from the last one backwards.
        own = x[:, D : 2 * D] if head.blocks == 1 else x
        expected = plain_loop(own, y, head.rate, 30, seed=3)
        torch.testing.assert_close((weight, bias), expected, atol=2e-6, rtol=1e-5)


def test_the_head_is_chosen_on_the_development_part_alone():
    (train_x, train_y), (test_x, test_y) = samples(200, seed=1), samples(500, seed=2)
    development = torch.arange(200) % 10 == 0
    chosen, share = best_of_bank(Splits(train_x, train_y, test_x, test_y, K), development, LAYOUT, steps=20)
    bank, scores = bank_of(LAYOUT), {}
    assert len(bank) == 13 * 4 == len(set(bank))
    for head in bank:
        (values,) = train_heads(train_x[~development], train_y[~development], K, [head], LAYOUT, steps=20)
        scores[head] = accuracy_of(head, values, train_x[development], train_y[development])
    assert scores[chosen] == max(scores.values()) > min(scores.values())
    shuffled = best_of_bank(Splits(train_x, train_y, test_x, test_y.flip(0), K), development, LAYOUT, steps=20)
    assert shuffled[0] == chosen and shuffled[1] != share
    (values,) = train_heads(train_x, train_y, K, [chosen], LAYOUT, steps=20)
    assert share == accuracy_of(chosen, values, test_x, test_y)


def test_a_head_that_diverged_is_never_right():
    x, y = samples(10, seed=1)
    undefined = torch.full((K, D), torch.nan), torch.zeros(K)
    assert accuracy_of(Head(1, False, 1.0), undefined, x, y) == 0


@pytest.mark.parametrize("parts", [{}, {"registers": 2}, {"pool": "mean"}, {"pool": "normed_mean"}, {"pool": "map"}])
def test_tokens_of_blocks(parts):
    """By a shorter model: the first blocks of a deep one, then the norm."""
    deep = valued(described(TINY | {"depth": 3} | parts))
    images = torch.rand(2, 64, 64, 3)
    with torch.no_grad():
        tokens, patches = deep.block_tokens(images, 2)
        whole = deep(images)
        deep.blocks = deep.blocks[:2]
        shorter = deep(images)
    pool = parts.get("pool", "cls")
    for at, outputs in enumerate((whole, shorter)):
        torch.testing.assert_close(tokens[:, at], outputs.tokens.mean(dim=1) if pool == "map" else outputs.pooled)
    assert tokens.shape[1] == 2 and (patches is None) == (pool != "cls")
    if patches is not None:
        torch.testing.assert_close(patches, whole.tokens[:, 1 + parts.get("registers", 0) :].mean(dim=1))


def test_a_model_without_blocks_has_its_representation():
    model = with_values(described({"name": "ResNet50x1", "blocks": [1, 1]}).build().to_empty(device="cpu")).eval()
    images = torch.rand(2, 64, 64, 3)
    with torch.no_grad():
        tokens, patches = model.block_tokens(images, 4)
        assert torch.equal(tokens[:, 0], model(images).pooled) and tokens.shape[1] == 1 and patches is None
    layout = Layout(1, tokens.shape[2], has_patches=False)
    assert {(head.blocks, head.patches) for head in bank_of(layout)} == {(1, False)}


def test_features_of_blocks_end_with_the_representation(home):
    """Where heads read one block without the mean of patches they see what the other classifiers do."""
    model = FinishedModel(home / "timm.safetensors", weights=OfWeights(model=TINY))
    loader = model.loader(model.dataset(str(home / "data" / "test")))
    features, layout = extract_blocks(loader, model.block_tokens)
    assert layout == Layout(2, TINY["width"], has_patches=True)
    expected = extract_features(loader, model.predict)
    assert torch.equal(features.uids, expected.uids)
    torch.testing.assert_close(features.features[:, layout.columns(Head(1, False, 0.1))], expected.features)
