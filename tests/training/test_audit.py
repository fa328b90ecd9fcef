"""Random projections and the optimizers' formulas, each against something else that knows them."""

import itertools
import math

import pytest
import torch

from vitscale.recipe import SGD, Adafactor, AdamW, Lamb, Muon
from vitscale.training.optimizers.projections import key_of, mixed, project, sample
from vitscale.training.optimizers.rule import Update, rule_of
from vitscale.training.optimizers.whole_tensors import Piece

CPU = torch.device("cpu")


def test_places_are_mixed_as_by_splitmix64():
    """The first numbers of the generator's published implementation, for the seed 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [int(x) % 2**64 for x in mixed(1, 5, 1234567, CPU)] == known


@pytest.mark.parametrize("lengths", [[200_000], [1, 70_000, 0, 129_999], [65_536, 65_536, 68_928]])
def test_pieces_have_the_projections_of_their_places(lengths):
    values, key = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(1)), key_of("a", 1)
    found = project(values, 0, key, torch.tensor(lengths))
    words = [int(word) % 2**64 for word in mixed(0, len(values) // 64 + 1, key, CPU)]
    signs = torch.tensor([2.0 * (word >> bit & 1) - 1 for word in words for bit in range(64)][: len(values)]).double()
    parts = (values.double() * signs).split(lengths)
    torch.testing.assert_close(found[:, 0], torch.stack([part.sum() for part in parts]))
    torch.testing.assert_close(found[:, 1], torch.stack([part.square().sum() for part in parts]))
    start = 0
    for row, part in zip(found, values.split(lengths), strict=True):
        torch.testing.assert_close(project(part, start, key, torch.tensor([len(part)]))[0], row)
        start += len(part)


def test_a_difference_shows_in_proportion_to_its_norm():
    """Over many keys the projections of one vector have its norm as their root mean square."""
    values = torch.randn(300, generator=torch.Generator().manual_seed(2))
    dots = torch.stack([project(values, 0, key_of(each), torch.tensor([300]))[0, 0] for each in range(2000)])
    assert float(dots.square().mean().sqrt() / values.norm()) == pytest.approx(1, abs=0.06)
    assert float(dots.mean() / values.norm()) == pytest.approx(0, abs=0.09)


def test_a_sample_is_of_the_piece():
    assert sample(5, 64, 1).tolist() == [0, 1, 2, 3, 4]
    places = sample(1000, 64, key_of("b"))
    assert len(places) == 64 and int(places.min()) >= 0 and int(places.max()) < 1000 and len(set(places.tolist())) > 50


BLOCKS = {
    "adamw": AdamW(lr=1.0),
    "sgd": SGD(name="sgd", lr=1.0),
    "sgd-bf16": SGD(name="sgd", lr=1.0, momentum_dtype="bf16"),
    "lamb": Lamb(name="lamb", lr=1.0),
    "adafactor": Adafactor(name="adafactor", lr=1.0),
    "muon": Muon(name="muon", lr=1.0),
}
# Sizes of the gradients of six updates: usual ones, none, none at first, a jump, and next to nothing.
COURSES = [[1.0] * 6, [0.0] * 6, [0, 0, 0, 1e-3, 1e-3, 1e-3], [1e-6, 1e-6, 1, 1, 1, 1], [1e-12] * 6]


@pytest.mark.parametrize("shape", [(200,), (40, 50)])
@pytest.mark.parametrize("name", BLOCKS)
def test_an_audit_passes_what_the_optimizers_do_and_nothing_else(name, shape):
    """Whatever the gradients; with another learning rate, weight decay or momentum it is noticed."""
    settings, generator = BLOCKS[name], torch.Generator().manual_seed(4)
    rule, kept = rule_of(settings), settings.kept("blocks.0.weight", shape)
    kinds = [kind for kind, of_kind in kept.items() if of_kind == shape]
    for sizes, rate in itertools.product(COURSES, (1e-2, 1e-5, 1e-8)):
        weights = torch.nn.Parameter(torch.randn(math.prod(shape), generator=generator) * 0.02)
        optimizer = rule.build([{"params": [weights], "weight_decay": 0.05}])
        if settings.needs_whole_tensors:
            piece = Piece("blocks.0.weight", 0, weights.numel(), weights, 0)
            optimizer.attach([weights], [piece], {piece.name: shape}, are_shared=False)
        state = optimizer.state[weights]
        for kind, of_kind in kept.items():
            dtype = torch.bfloat16 if kind in settings.kept_in_bf16 else torch.float32
            state[kind if of_kind == shape else f"{kind}/blocks.0.weight"] = torch.zeros(
                weights.numel() if of_kind == shape else of_kind, dtype=dtype
            )
        if name == "adamw":
            state["step"] = torch.tensor(0.0)

        def now(state=state, weights=weights) -> dict[str, torch.Tensor]:
            values = {"master": weights.detach(), **{kind: state[kind] for kind in kinds}}
            return {kind: value.double().view(-1).clone() for kind, value in values.items()}

        for number, size in enumerate(sizes, 1):
            weights.grad = torch.randn(weights.numel(), generator=generator) * size
            optimizer.param_groups[0] |= {"lr": rate, "updates": number}
            before, gradient = now(), weights.grad.double().clone()
            optimizer.step()
            after = now()

            def is_within(update: Update, at=(before, gradient, after)) -> bool:
                found = rule.of_elements(update, *at)
                assert settings.needs_whole_tensors or found.keys() == at[2].keys()
                return all(bool(((at[2][kind] - value).abs() <= off).all()) for kind, (value, off) in found.items())

            made = Update(shape, number, rate, 0.05, settings.first_momentum)
            assert is_within(made), (sizes, rate, number)
            # LAMB's length is taken from the step that was made, and Muon's matrices are only bounded.
            if size == 1 and rate == 1e-2 and number > 1 and name not in ("lamb", "muon"):
                changes = [{"rate": 1.01 * rate}, {"rate": 0.0}, {"decay": 0.06}]
                for change in changes if settings.kept_in_bf16 else [*changes, {"momentum": 0.91}]:
                    assert not is_within(made._replace(**change)), change
