"""Position embeddings against scipy's zoom, against their definitions written out, and against one another."""

import itertools

import numpy as np
import pytest
import torch
from models.small_models import build, images, with_values

from vitscale.models.vit.positions import TwoDPositions, resample_positions, sincos_positions
from vitscale.recipe.families import Position, ViTShape


def model(depth: int = 2, attention: str = "full", **options):
    shape = ViTShape(8, 48, depth, 96, 3, attention)
    return with_values(build(shape, image_size=32, num_classes=7, **options)).eval()


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize(
    ("old", "new"),
    [((14, 14), (24, 24)), ((24, 24), (14, 14)), ((7, 7), (12, 12)), ((7, 10), (12, 9)), ((16, 16), (37, 37))],
)
def test_resampling_is_the_authors_zoom(old, new, class_token):
    ndimage = pytest.importorskip("scipy.ndimage")
    positions = torch.randn(1, old[0] * old[1] + class_token, 5, generator=torch.Generator().manual_seed(0))
    resampled = resample_positions(positions, old, new, class_token)
    grid = positions[0, int(class_token) :].view(*old, 5).double().numpy()
    zoomed = ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1)
    assert zoomed.shape == (*new, 5)
    assert np.abs(resampled[0, int(class_token) :].view(*new, 5).numpy() - zoomed).max() < 1e-5
    assert torch.equal(resampled[:, : int(class_token)], positions[:, : int(class_token)])


def test_resampling_to_the_same_grid_changes_no_bit():
    positions = torch.randn(1, 1 + 6, 4)
    assert torch.equal(resample_positions(positions, (2, 3), (2, 3)), positions)


def test_resampling_says_what_does_not_fit():
    with pytest.raises(ValueError, match=r"\b16\b.*\b4 x 5\b"):
        resample_positions(torch.zeros(1, 17, 4), (4, 5), (8, 8))


def test_two_dimensional_positions_are_an_x_and_a_y_half():
    positions = TwoDPositions(3, 8, class_token=True)
    with torch.no_grad():
        for parameter in positions.parameters():
            parameter.normal_()
    values = positions()
    assert values.shape == (1, 10, 8) and torch.equal(values[0, 0], positions.cls[0])
    for row in range(3):
        for column in range(3):
            expected = torch.cat([positions.x[column], positions.y[row]])
            assert torch.equal(values[0, 1 + 3 * row + column], expected)


@pytest.mark.parametrize(("grid", "width"), [(1, 8), (3, 12), (14, 192), (24, 768)])
def test_sines_and_cosines_are_big_vision_s(grid, width):
    """Its definition in fp64: a mesh of rows y and columns x, and omega from 1 down to 1 / temperature."""
    y, x = np.mgrid[:grid, :grid]
    omega = 1 / 10_000 ** (np.arange(width // 4) / (width // 4 - 1))
    by_row, by_column = (np.outer(axis.ravel(), omega) for axis in (y, x))
    expected = np.concatenate([np.sin(by_column), np.cos(by_column), np.sin(by_row), np.cos(by_row)], axis=1)
    found = sincos_positions(grid, width, like=torch.empty(0))
    assert found.shape == (1, grid**2, width)
    assert np.abs(found[0].numpy() - expected).max() < 1e-5
    assert sincos_positions(grid, width, like=torch.empty(0, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_relative_attention_by_definition():
    """Appendix D.3: logits of content and of the offset's embedding, summed before the softmax."""
    attention = model(position=Position(kind="relative")).blocks[0].attention
    x = torch.randn(2, 17, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        query, key, value = (part.view(2, 17, 3, 16).transpose(1, 2) for part in attention.qkv(x).chunk(3, dim=-1))
        offsets = torch.arange(17) - torch.arange(17).unsqueeze(1) + 16
        of_offset = attention.relative[offsets].view(17, 17, 3, 16)
        logits = torch.einsum("baid,bajd->baij", query, key) + torch.einsum("baid,ijad->baij", query, of_offset)
        mixed = (logits / 4).softmax(-1) @ value
        expected = attention.out(mixed.transpose(1, 2).flatten(2))
        assert torch.allclose(attention(x), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_the_places_of_absolute_positions_agree_where_they_must(kind):
    pixels = images(32)
    with torch.no_grad():
        # Before a single block the stem and the beginning of the layer are one place.
        stem, shared = model(1, position=Position(kind=kind)), model(1, position=Position(kind=kind, at="shared"))
        shared.load_state_dict(stem.state_dict())
        assert torch.equal(stem(pixels).logits, shared(pixels).logits)
        # Layers that happen to have learned the same are layers that share.
        shared, every = (model(position=Position(kind=kind, at=at)) for at in ("shared", "every_layer"))
        state = shared.state_dict()
        of_layers = {
            name: state[name.split(".", 2)[2]] if "pos_embedding" in name else state[name]
            for name in every.state_dict()
        }
        every.load_state_dict(of_layers)
        assert torch.equal(shared(pixels).logits, every(pixels).logits)
        stem = model(position=Position(kind=kind))
        stem.load_state_dict(state)
        assert not torch.allclose(shared(pixels).logits, stem(pixels).logits, atol=1e-2)


def test_without_positions_the_patches_are_a_bag():
    bag, ordered = model(position=Position(kind="none")), model()
    pixels = images(32)
    shuffled = pixels.view(2, 4, 8, 4, 8, 3)[:, [2, 0, 3, 1]].reshape(2, 32, 32, 3)
    with torch.no_grad():
        assert torch.allclose(bag(pixels).logits, bag(shuffled).logits, atol=1e-5)
        assert not torch.allclose(ordered(pixels).logits, ordered(shuffled).logits, atol=1e-2)


@pytest.mark.parametrize("attention", ["full", "axial"])
@pytest.mark.parametrize(
    ("kind", "at"),
    [("none", "stem"), ("relative", "stem"), *itertools.product(["1d", "2d"], ["stem", "every_layer", "shared"])],
)
def test_every_kind_learns_and_gradients_of_single_images_add_up(kind, at, attention):
    """Of a batch of one, the gradients of several parameters may be one tensor, to which torch would add twice."""
    together, added = (model(position=Position(kind=kind, at=at), attention=attention) for _ in range(2))
    pixels = images(32)
    sum(together(one).logits.square().sum() for one in pixels.split(1)).backward()
    for one in pixels.split(1):
        added(one).logits.square().sum().backward()
    for (name, expected), found in zip(together.named_parameters(), added.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4, msg=name)
        assert expected.grad.abs().max() > 0, name
