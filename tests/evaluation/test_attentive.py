"""The bank of attentive heads against torch's own attention."""

import pytest
import torch
from models.weights.exported import TINY
from torch import nn
from torch.nn import functional as F
from toy_split import train_plainly

from vitscale.evaluation.attentive import AttentiveHead, best_attentive, logits_of, train_attentive
from vitscale.evaluation.features import extract_features
from vitscale.evaluation.fewshot import development
from vitscale.evaluation.finished import FinishedModel, OfWeights
from vitscale.evaluation.heads import RATES, accuracy
from vitscale.evaluation.probes import Splits
from vitscale.evaluation.representation import FEWSHOT_CROP, Measuring, default_counts, measure
from vitscale.ground.errors import DataError

K, T, D = 3, 5, 128
EVERY = torch.arange(300)


def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, K, (count,), generator=generator)
    centres = torch.randn(K, T, D, generator=torch.Generator().manual_seed(7))
    return centres[y] + 10 * torch.randn(count, T, D, generator=generator), y


def accuracy_of(head, x, y, rows):
    return accuracy(lambda tokens: logits_of([head], tokens)[0], x, y, rows)


class Plain(nn.Module):
    """What CAPI describes, with torch's own attention."""

    def __init__(self, head):
        super().__init__()
        heads = len(head.query)
        self.query = nn.Parameter(head.query.detach().flatten()[None].clone())
        self.attention = nn.MultiheadAttention(D, heads, batch_first=True)
        self.linear = nn.Linear(D, K)
        with torch.no_grad():
            weight, bias = self.attention.in_proj_weight, self.attention.in_proj_bias
            weight.copy_(torch.cat([torch.eye(D), head.key.flatten(0, 1), head.value.flatten(0, 1)]))
            bias.zero_()
            self.attention.out_proj.weight.copy_(torch.eye(D))
            self.attention.out_proj.bias.zero_()
            self.linear.weight.copy_(head.weight)
            self.linear.bias.copy_(head.bias)
        self.attention.out_proj.requires_grad_(False)
        learned = torch.arange(3 * D) >= D  # neither a projection of the query nor a bias of the keys is learned
        weight.register_hook(lambda gradient: gradient * learned[:, None])
        bias.register_hook(lambda gradient: gradient * (torch.arange(3 * D) >= 2 * D))

    def forward(self, tokens):
        seen, _ = self.attention(self.query.expand(len(tokens), 1, D), tokens, tokens, need_weights=False)
        return self.linear(seen[:, 0])


def plain_loop(x, y, rate, steps, seed):
    plain = Plain(AttentiveHead.begin(D, K, seed))
    adam = torch.optim.Adam([p for p in plain.parameters() if p.requires_grad], lr=rate, betas=(0.9, 0.95))
    train_plainly(plain, adam, x, y, steps, seed)
    return plain.eval()


@pytest.mark.parametrize("rates", [(1e-3,), (1e-4, 1e-3, 1e-2)])
def test_every_head_is_what_a_plain_loop_with_torch_s_attention_trains(rates):
    (x, y), (test_x, test_y) = samples(300, 1), samples(200, 2)
    heads = train_attentive(Splits(x, y, x, y, K), EVERY, rates, steps=25, seed=3)
    for head, rate, logits in zip(heads, rates, logits_of(heads, test_x), strict=True):
        expected = plain_loop(x, y, rate, 25, seed=3)(test_x)
        loss, wanted = F.cross_entropy(logits, test_y).item(), F.cross_entropy(expected, test_y).item()
        assert loss == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        right = (expected.argmax(dim=1) == test_y).double().mean().item()
        assert accuracy_of(head, test_x, test_y, torch.arange(200)) == right


def test_the_bank_is_chosen_on_the_development_part_alone_and_no_head_depends_on_others():
    (x, y), (test_x, test_y) = samples(300, 1), samples(100, 2)
    held = EVERY % 10 == 0
    rate, share = best_attentive(Splits(x, y, test_x, test_y, K), held, steps=8)
    scores = {}
    for each in RATES:
        (head,) = train_attentive(Splits(x, y, x, y, K), EVERY[~held], [each], steps=8)
        scores[each] = accuracy_of(head, x, y, EVERY[held])
    assert scores[rate] == max(scores.values()) > min(scores.values())
    (head,) = train_attentive(Splits(x, y, x, y, K), EVERY, [rate], steps=8)
    assert share == accuracy_of(head, test_x, test_y, torch.arange(100))
    assert best_attentive(Splits(x, y, test_x, test_y.flip(0), K), held, steps=8)[0] == rate


@pytest.mark.parametrize(("width", "heads"), [(16, 1), (64, 1), (128, 2), (192, 3), (200, 2), (1024, 16)])
def test_heads_of_attention_are_64_wide_where_that_divides_the_width(width, heads):
    assert len(AttentiveHead.begin(width, K, 0).query) == heads


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
