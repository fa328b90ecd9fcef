"""The banks of linear and of attentive heads against torch's own layers, optimisers and schedule."""

import pytest
import torch
from models.small_models import with_values
from models.weights.exported import TINY, described, valued
from torch import nn
from torch.nn import functional as F
from toy_split import train_plainly

from vitscale.evaluation.attentive import AttentiveHead, best_attentive, train_attentive
from vitscale.evaluation.attentive import logits_of as attentive_logits
from vitscale.evaluation.features import extract_features
from vitscale.evaluation.fewshot import development
from vitscale.evaluation.finished import FinishedModel, OfWeights
from vitscale.evaluation.heads import (
    RATES,
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
from vitscale.evaluation.representation import FEWSHOT_CROP, Measuring, default_counts, measure
from vitscale.ground.errors import DataError

K, D = 4, 6
LAYOUT = Layout(blocks=4, width=D, has_patches=True)
CLASSES, TOKENS, WIDTH = 3, 5, 128  # of what attentive heads see
EVERY = torch.arange(300)


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
    held = torch.arange(200) % 10 == 0
    chosen, share = best_of_bank(Splits(train_x, train_y, test_x, test_y, K), held, LAYOUT, steps=20)
    bank, scores = bank_of(LAYOUT), {}
    assert len(bank) == 13 * 4 == len(set(bank))
    for head in bank:
        (values,) = train_heads(train_x[~held], train_y[~held], K, [head], LAYOUT, steps=20)
        scores[head] = accuracy_of(head, values, train_x[held], train_y[held])
    assert scores[chosen] == max(scores.values()) > min(scores.values())
    shuffled = best_of_bank(Splits(train_x, train_y, test_x, test_y.flip(0), K), held, LAYOUT, steps=20)
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


def tokens_of_samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    centres = torch.randn(CLASSES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(7))
    return centres[y] + 10 * torch.randn(count, TOKENS, WIDTH, generator=generator), y


def attentive_accuracy(head, x, y, rows):
    return accuracy(lambda tokens: attentive_logits([head], tokens)[0], x, y, rows)


class PlainAttentive(nn.Module):
    """What CAPI describes, with torch's own attention."""

    def __init__(self, head):
        super().__init__()
        heads = len(head.query)
        self.query = nn.Parameter(head.query.detach().flatten()[None].clone())
        self.attention = nn.MultiheadAttention(WIDTH, heads, batch_first=True)
        self.linear = nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            weight, bias = self.attention.in_proj_weight, self.attention.in_proj_bias
            weight.copy_(torch.cat([torch.eye(WIDTH), head.key.flatten(0, 1), head.value.flatten(0, 1)]))
            bias.zero_()
            self.attention.out_proj.weight.copy_(torch.eye(WIDTH))
            self.attention.out_proj.bias.zero_()
            self.linear.weight.copy_(head.weight)
            self.linear.bias.copy_(head.bias)
        self.attention.out_proj.requires_grad_(False)
        learned = torch.arange(3 * WIDTH) >= WIDTH  # neither a projection of the query nor a bias of the keys is
        weight.register_hook(lambda gradient: gradient * learned[:, None])
        bias.register_hook(lambda gradient: gradient * (torch.arange(3 * WIDTH) >= 2 * WIDTH))

    def forward(self, tokens):
        seen, _ = self.attention(self.query.expand(len(tokens), 1, WIDTH), tokens, tokens, need_weights=False)
        return self.linear(seen[:, 0])


def plain_attentive(x, y, rate, steps, seed):
    plain = PlainAttentive(AttentiveHead.begin(WIDTH, CLASSES, seed))
    adam = torch.optim.Adam([p for p in plain.parameters() if p.requires_grad], lr=rate, betas=(0.9, 0.95))
    train_plainly(plain, adam, x, y, steps, seed)
    return plain.eval()


@pytest.mark.parametrize("rates", [(1e-3,), (1e-4, 1e-3, 1e-2)])
def test_every_attentive_head_is_what_a_plain_loop_with_torch_s_attention_trains(rates):
    (x, y), (test_x, test_y) = tokens_of_samples(300, 1), tokens_of_samples(200, 2)
    heads = train_attentive(Splits(x, y, x, y, CLASSES), EVERY, rates, steps=25, seed=3)
    for head, rate, logits in zip(heads, rates, attentive_logits(heads, test_x), strict=True):
        expected = plain_attentive(x, y, rate, 25, seed=3)(test_x)
        loss, wanted = F.cross_entropy(logits, test_y).item(), F.cross_entropy(expected, test_y).item()
        assert loss == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        right = (expected.argmax(dim=1) == test_y).double().mean().item()
        assert attentive_accuracy(head, test_x, test_y, torch.arange(200)) == right


def test_the_attentive_head_is_chosen_on_the_development_part_alone_and_depends_on_no_other():
    (x, y), (test_x, test_y) = tokens_of_samples(300, 1), tokens_of_samples(100, 2)
    held = EVERY % 10 == 0
    rate, share = best_attentive(Splits(x, y, test_x, test_y, CLASSES), held, steps=8)
    scores = {}
    for each in RATES:
        (head,) = train_attentive(Splits(x, y, x, y, CLASSES), EVERY[~held], [each], steps=8)
        scores[each] = attentive_accuracy(head, x, y, EVERY[held])
    assert scores[rate] == max(scores.values()) > min(scores.values())
    (head,) = train_attentive(Splits(x, y, x, y, CLASSES), EVERY, [rate], steps=8)
    assert share == attentive_accuracy(head, test_x, test_y, torch.arange(100))
    assert best_attentive(Splits(x, y, test_x, test_y.flip(0), CLASSES), held, steps=8)[0] == rate


@pytest.mark.parametrize(("width", "heads"), [(16, 1), (64, 1), (128, 2), (192, 3), (200, 2), (1024, 16)])
def test_heads_of_attention_are_64_wide_where_that_divides_the_width(width, heads):
    assert len(AttentiveHead.begin(width, CLASSES, 0).query) == heads


def test_a_finished_model_is_measured_by_its_patches(home, monkeypatch):
    model = FinishedModel(home / "timm.safetensors", weights=OfWeights(model=TINY))
    tasks = [(str(home / "data" / "train"), str(home / "data" / "test"))]
    monkeypatch.setattr("vitscale.evaluation.heads.FEWEST_STEPS", 8)
    (task,) = measure(model, tasks, Measuring("attentive", default_counts("attentive"), 1, 1.0))["tasks"].values()
    loaders = [model.loader(model.dataset(name), FEWSHOT_CROP) for name in tasks[0]]
    parts = [extract_features(loader, model.predict_patches) for loader in loaders]
    splits = [each for part in parts for each in (part.features.flatten(1, 2), part.labels)]
    classes = len(model.dataset(tasks[0][0]).class_names)
    rate, share = best_attentive(Splits(*splits, classes), development(parts[0].labels, parts[0].uids))
    assert task["all"] == {"mean": share, "std": 0.0, "lr": rate, "draws": 1}
    monkeypatch.setattr("vitscale.evaluation.representation.available_memory", lambda: 1000)
    with pytest.raises(DataError, match="room for 0 images"):
        measure(model, tasks, Measuring("attentive", default_counts("attentive"), 1, 1.0))
