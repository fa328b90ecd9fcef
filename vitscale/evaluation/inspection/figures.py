"""The figures of an inspection, of one model or of several side by side, each with its numbers.

They are Figures 6, 7, 9, 10 of the paper and those of its appendix, and others that later work introduced.

Shape legend: k pictures, L layers, N patches, n patches on a side.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from vitscale.evaluation.inspection.attention import Reach, distances
from vitscale.evaluation.inspection.looking import Findings
from vitscale.evaluation.inspection.mosaics import TILE, colour_tile, heat_tile, lit_tile, mosaic, picture_tile
from vitscale.evaluation.inspection.representation import Components, alignment
from vitscale.ground.page import FAINT, SERIES, Facts, Part, Plot, Section, Text, page_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSPECTION_PAGE = "index.html"
OUTLIER = 4.0  # a token is an outlier if its norm is more than this many times the median of its layer
_PANEL = 360  # width of one model's panel in pixels
_LAYERS_SHOWN = 12
_TILES_OF_A_SIDE = 16  # most tiles of position similarity on a side; of larger grids every second, third, ... is shown

Value = str | int | float


@dataclass(frozen=True)
class InspectionFigure(Plot):
    """One figure and its numbers, as `rows` of named `columns`."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]


def inspection_figures(findings: dict[str, Findings]) -> list[InspectionFigure]:
    """All figures that the findings allow. Their keys are the models' names in the figures."""
    makers: Sequence[tuple[str, Callable[[dict[str, Any], dict[str, Findings]], InspectionFigure | None]]] = (
        *(("components", _filters), ("similarities", _positions), ("reach", _distance), ("reach", _entropy)),
        *(("rollout", _rollout), ("maps", _maps), ("grams", _alignment), ("norms", _norms), ("norms", _norm_maps)),
        ("colours", _colours),
    )
    figures = []
    for attribute, make in makers:
        values = {name: getattr(each, attribute) for name, each in findings.items()}
        found = {name: value for name, value in values.items() if isinstance(value, Tensor) or value}
        if found and (figure := make(found, findings)) is not None:
            figures.append(figure)
    return figures


def write_page(
    folder: Path,
    figures: Sequence[InspectionFigure],
    title: str,
    subtitle: str,
    facts: Sequence[tuple[str, str]],
    notes: Sequence[str] = (),
) -> None:
    """Write all figures as PNG and SVG, their numbers as CSV, and a page of all into a folder that exists.

    Equal findings give equal bytes: the files contain no dates and no paths. Raises OSError.
    """
    for figure in figures:
        for form in ("png", "svg"):
            figure.save(folder / f"{figure.key}.{form}")
        with (folder / f"{figure.key}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([figure.columns, *figure.rows])
    said: list[Part] = [Facts(facts), *(Text(note, "note") for note in notes)]
    shown = [Section(figure.title, [figure.drawing]) for figure in figures]
    page = page_text(title, subtitle, [Section("What was looked at", said), *shown])
    (folder / INSPECTION_PAGE).write_text(page, encoding="utf-8")


def _filters(found: dict[str, Components], findings: dict[str, Findings]) -> InspectionFigure:
    def put(figure: Figure) -> None:
        for (name, components), axes in zip(found.items(), _panels(figure, len(found)), strict=True):
            tiles = []
            for component in components.filters.numpy():
                low, high = component.min(), component.max()
                stretched = (component - low) / max(high - low, 1e-30) * 255
                tiles.append(picture_tile(stretched.round().astype(np.uint8), 64))
            _show(axes, mosaic([tiles[start : start + 7] for start in range(0, len(tiles), 7)]), name, findings)

    h, w, c = max({components.filters.shape[1:] for components in found.values()})
    columns = ["model", "component", "share_of_variance", *_grid_names("value", h, w, c)]
    rows: list[list[Value]] = [
        [name, index, _short(share), *map(_short, component.flatten().tolist())]
        for name, components in found.items()
        for index, (component, share) in enumerate(zip(components.filters, components.shares.tolist(), strict=True), 1)
    ]
    caption = (
        "The first principal components of the filters of the first layer, in the order of the variance that they "
        "explain, each stretched to the full range of colours (Figure 7, left)."
    )
    return InspectionFigure(
        "filters", "Filters of the embedding", caption, put, _PANEL * len(found), 230, columns, rows
    )


def _positions(similarities: dict[str, dict[str, Tensor]], findings: dict[str, Findings]) -> InspectionFigure:
    found = {(name, where): values.numpy() for name, each in similarities.items() for where, values in each.items()}
    across = min(len(found), 3)
    down = math.ceil(len(found) / across)
    grids = {name: each.grid for name, each in findings.items()}

    def put(figure: Figure) -> None:
        panels = _panels(figure, across, down)
        for ((name, where), values), axes in zip(found.items(), panels, strict=False):
            n = grids[name] or 1
            tiles = values.reshape(n, n, n, n)[:: _step(n), :: _step(n)]
            side = max(n, 24)
            shown = mosaic([[heat_tile(tile, -1, 1, side) for tile in line] for line in tiles], max(1, side // 12))
            _show(axes, shown, name, findings, "" if where == "learned" else where)
            axes.set(xlabel="column of the patch", ylabel="row of the patch")
        figure.colorbar(_scale(-1, 1), ax=list(panels), label="cosine similarity", shrink=0.8)

    largest = max(len(values) for values in found.values())
    rows: list[list[Value]] = []
    for (name, where), values in found.items():
        n = math.isqrt(len(values))
        for row, column in itertools.product(range(0, n, _step(n)), repeat=2):
            rows.append([name, where, row, column, *map(_short, values[row * n + column].tolist())])
    columns = ["model", "added", "row", "column", *_grid_names("to", math.isqrt(largest), math.isqrt(largest))]
    caption = (
        "Each tile belongs to one patch, where it lies in the picture, and shows how alike its position embedding is "
        "to those of all patches (Figure 7, centre; Figure 9)."
    )
    width, height = (440, 380) if across == 1 else (_PANEL * across, 340 * down)
    return InspectionFigure(
        "position_similarity", "Similarity of position embeddings", caption, put, width, height, columns, rows
    )


def _step(n: int) -> int:
    return math.ceil(n / _TILES_OF_A_SIDE)


def _distance(found: dict[str, dict[str, Reach]], findings: dict[str, Findings]) -> InspectionFigure:
    def numbers(reach: Reach, head: int) -> Sequence[float]:
        of_head = reach.distance[:, head].double()
        on_patches = reach.on_patches[:, head].double().mean().item()
        return of_head.mean().item(), of_head.std(correction=0).item(), on_patches

    def even_distance(each: Findings) -> float:
        assert each.grid is not None, "a model with attention has a grid"
        return distances(each.grid, each.stride, "grid").mean().item()

    some = findings[next(iter(found))]
    images = f"over {some.images} pictures of {some.image_size} pixels" if len(found) == 1 else "over all pictures"
    caption = (
        f"Each dot is a head: how far away what it attends to lies, weighted by attention, {images}; the class token "
        "and registers do not count (Figure 7, right; appendix D.6). Dashed: attention that is the same everywhere."
    )
    columns, label = ["distance_px", "deviation_px", "attention_on_patches"], "mean attention distance (pixels)"
    return _of_heads("distance", caption, found, findings, columns, numbers, label, even_distance)


def _entropy(found: dict[str, dict[str, Reach]], findings: dict[str, Findings]) -> InspectionFigure:
    def numbers(reach: Reach, head: int) -> Sequence[float]:
        return (reach.entropy.double().mean(dim=0)[head].item(),)

    caption = (
        "Each dot is a head: 0 where it attends to one token alone, the logarithm of the number of tokens where it "
        "attends to all alike."
    )
    return _of_heads("entropy", caption, found, findings, ["entropy_nats"], numbers, "entropy of attention (nats)")


def _of_heads(
    quantity: Literal["distance", "entropy"],
    caption: str,
    found: dict[str, dict[str, Reach]],
    findings: dict[str, Findings],
    columns: Sequence[str],
    numbers: Callable[[Reach, int], Sequence[float]],
    label: str,
    even: Callable[[Findings], float] | None = None,
) -> InspectionFigure:
    """A dot for each head, in a column for each layer, a line through the layers' means, and one at `even`."""

    def put(figure: Figure) -> None:
        panels = _panels(figure, len(found), shared=True)
        for (name, layers), axes in zip(found.items(), panels, strict=True):
            means = [getattr(reach, quantity).double().mean(dim=0).tolist() for reach in layers.values()]
            at = [index for index, heads in enumerate(means, 1) for _ in heads]
            axes.plot(at, [head for heads in means for head in heads], "o", color=SERIES[0], alpha=0.6, markersize=4)
            of_layers = [sum(heads) / len(heads) for heads in means]
            axes.plot(range(1, len(means) + 1), of_layers, color=SERIES[1], label="mean")
            _layers_below(axes, list(layers))
            if even is not None:
                axes.axhline(even(findings[name]), color=FAINT, linestyle="--", linewidth=1, label="even attention")
            axes.set_ylim(0, max(axes.get_ylim()[1], *axes.dataLim.intervaly * 1.06))  # some room above the highest
            _titled(axes, name, findings)
        panels[0].set_ylabel(label)
        if even is not None:
            panels[-1].legend(loc="lower right")

    rows: list[list[Value]] = [
        [name, layer, head + 1, *map(_short, numbers(reach, head))]
        for name, layers in found.items()
        for layer, reach in layers.items()
        for head in range(reach.distance.shape[1])
    ]
    title, columns = f"Attention {quantity}", ["model", "layer", "head", *columns]
    return InspectionFigure(f"attention_{quantity}", title, caption, put, _width(found), 300, columns, rows)


def _layers_below(axes: Axes, names: Sequence[str]) -> None:
    step = math.ceil(len(names) / 14)
    axes.set_xticks(range(1, len(names) + 1, step), names[::step])
    if max(map(len, names)) > 3:
        axes.tick_params(axis="x", labelrotation=90)
    axes.set_xlabel("layer")


def _rollout(found: dict[str, Tensor], findings: dict[str, Findings]) -> InspectionFigure:
    caption = (
        "What the representation is made of, by attention alone: attention averaged over heads, half of each layer's "
        "input beside it, multiplied through all layers (Abnar and Zuidema, 2020; Figure 6, appendix D.7). The "
        "brighter, the more; the brightest place of each picture is 1."
    )

    def lit(name: str) -> list[np.ndarray]:
        pictures = findings[name].pictures.numpy()
        return [lit_tile(picture, _square(w)) for picture, w in zip(pictures, found[name], strict=True)]

    drawn, numbers = _tiles_below(found, findings, lit), _by_patch("weight", found, findings)
    return InspectionFigure("attention_rollout", "Attention rollout", caption, *drawn, *numbers)


def _maps(found: dict[str, dict[str, Tensor]], findings: dict[str, Findings]) -> InspectionFigure:
    most_pictures = 4

    def put(figure: Figure) -> None:
        for (name, of_layers), axes in zip(found.items(), _panels(figure, 1, len(found)), strict=True):
            layers = list(of_layers)
            if len(layers) > _LAYERS_SHOWN:  # some, evenly spaced, including the last one
                layers = [layers[round((at + 1) * len(layers) / _LAYERS_SHOWN) - 1] for at in range(_LAYERS_SHOWN)]
            lines = []
            for index, picture in enumerate(findings[name].pictures[:most_pictures].numpy()):
                maps = [_square(of_layers[layer][index]) for layer in layers]
                heat = [heat_tile(values, 0, values.max(), TILE // 2) for values in maps]
                lines.append([picture_tile(picture, TILE // 2), *heat])
            _show(axes, mosaic(lines), name, findings)
            step = TILE // 2 + 4
            axes.set_axis_on()
            axes.spines[:].set_visible(False)
            axes.set_yticks([])
            axes.set_xticks([TILE // 4 + step * at for at in range(len(layers) + 1)], ["", *layers])
            axes.tick_params(length=0)
            axes.set_xlabel("layer")

    rows: list[list[Value]] = [
        [name, picture + 1, layer, *map(_short, values[picture].tolist())]
        for name, of_layers in found.items()
        for layer, values in of_layers.items()
        for picture in range(len(values))
    ]
    most = max(math.isqrt(values.shape[1]) for of_layers in found.values() for values in of_layers.values())
    caption = (
        "What the class token attends to in each layer, as a mean over heads; in models without one, what the patches "
        "attend to. Yellow is the largest of each map."
    )
    height = sum(70 * min(len(findings[name].pictures), most_pictures) + 60 for name in found)
    columns = ["model", "picture", "layer", *_grid_names("attention", most, most)]
    return InspectionFigure("attention_maps", "Attention by layer", caption, put, 900, height, columns, rows)


def _alignment(found: dict[str, dict[str, list[Tensor]]], findings: dict[str, Findings]) -> InspectionFigure:
    names = list(found)
    pairs = [(name, name) for name in names] + [(names[0], name) for name in names[1:]]
    grams = {name: list(each.values()) for name, each in found.items()}
    values = {(a, b): alignment(grams[a], grams[b]).numpy() for a, b in pairs}
    across = min(len(pairs), 3)
    down = math.ceil(len(pairs) / across)

    def put(figure: Figure) -> None:
        panels = _panels(figure, across, down)
        for (a, b), axes in zip(pairs, panels, strict=False):
            axes.imshow(values[a, b], cmap="viridis", vmin=0, vmax=1, origin="lower")
            for axis, name in ((axes.yaxis, a), (axes.xaxis, b)):
                layers = list(found[name])
                step = math.ceil(len(layers) / 13)
                axis.set_ticks(range(0, len(layers), step), layers[::step])
                axis.set_label_text("layer" if len(found) == 1 else f"layer of {name}")
            axes.tick_params(axis="x", labelrotation=90)
            axes.grid(False)
        for axes in panels[len(pairs) :]:
            axes.set_axis_off()
        figure.colorbar(_scale(0, 1), ax=list(panels), label="alignment", shrink=0.8)

    rows: list[list[Value]] = [
        [a, layer, b, other, _short(value)]
        for (a, b), table in values.items()
        for layer, line in zip(found[a], table.tolist(), strict=True)
        for other, value in zip(found[b], line, strict=True)
    ]
    caption = (
        "Linear centred kernel alignment of the tokens of every two layers: 1 where they represent the pictures alike, "
        "0 where nothing is (Kornblith et al., 2019; the unbiased estimate over minibatches)."
    )
    width, height = (460, 400) if across == 1 else (_PANEL * across, 350 * down)
    columns = ["model", "layer", "other_model", "other_layer", "alignment"]
    return InspectionFigure("layer_alignment", "Alignment of layers", caption, put, width, height, columns, rows)


def _norms(norms: dict[str, dict[str, Tensor]], findings: dict[str, Findings]) -> InspectionFigure:
    found = {name: _statistics(findings[name]) for name in norms}
    columns = ["model", "layer", "median", "percentile_99", "largest", "share_of_outliers", "first_token"]

    def put(figure: Figure) -> None:
        from matplotlib.ticker import LogLocator, NullFormatter

        panels = _panels(figure, len(found), shared=True)
        for (name, table), axes in zip(found.items(), panels, strict=True):
            layers = range(1, len(table) + 1)
            for series, (column, label) in enumerate([(0, "median"), (1, "99 %"), (2, "largest")]):
                axes.plot(layers, [line[column] for line in table.values()], color=SERIES[series], label=label)
            firsts = [line[4] for line in table.values()]
            if not all(math.isnan(first) for first in firsts):
                axes.plot(layers, firsts, ":", color=SERIES[3], label="first token")
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
            _layers_below(axes, list(table))
            _titled(axes, name, findings)
        panels[0].set_ylabel("norm of a token")
        panels[0].legend(loc="upper left")

    rows: list[list[Value]] = [
        [name, layer, *("" if math.isnan(number) else _short(number) for number in line)]
        for name, table in found.items()
        for layer, line in table.items()
    ]
    caption = (
        "Norms of the patches' tokens behind each layer, and of the first token where others come before the patches. "
        f"A few far above the median (outliers: more than {OUTLIER:g} times) are what registers were invented for "
        "(Darcet et al., 2024)."
    )
    return InspectionFigure("token_norms", "Norms of tokens", caption, put, _width(found), 300, columns, rows)


def _statistics(found: Findings) -> dict[str, tuple[float, ...]]:
    """Layer -> median, 99th percentile and largest norm of a patch, share of outliers, mean norm of the first token."""
    table: dict[str, tuple[float, ...]] = {}
    for layer, norms in found.norms.items():
        values = np.sort(norms.numpy(), axis=None)
        median = float(np.median(values))
        first = found.first_norms[layer].double().mean().item() if layer in found.first_norms else math.nan
        share = float((values > OUTLIER * median).mean())
        table[layer] = (median, float(np.quantile(values, 0.99)), float(values[-1]), share, first)
    return table


def _norm_maps(norms: dict[str, dict[str, Tensor]], findings: dict[str, Findings]) -> InspectionFigure | None:
    pictures = {name: len(findings[name].pictures) for name in norms if len(findings[name].pictures)}
    if not (found := {name: list(norms[name].values())[-1][:count] for name, count in pictures.items()}):
        return None

    def heat(name: str) -> list[np.ndarray]:
        maps = [_square(values) for values in found[name]]
        high = max(float(values.max()) for values in maps)
        return [heat_tile(values, 0, high) for values in maps]

    caption = "Norms of the patches' tokens behind the last layer. Yellow is the largest of all pictures, dark is 0."
    drawn, numbers = _tiles_below(found, findings, heat), _by_patch("norm", found, findings)
    return InspectionFigure("token_norm_maps", "Norms in the pictures", caption, *drawn, *numbers)


def _colours(found: dict[str, Tensor], findings: dict[str, Findings]) -> InspectionFigure:
    rows: list[list[Value]] = []
    for name, pictures in found.items():
        for picture, values in enumerate(pictures, 1):
            n = math.isqrt(len(values))
            rows += [[name, picture, *divmod(at, n), *map(_short, value)] for at, value in enumerate(values.tolist())]
    shares = "; ".join(
        f"{'' if len(found) == 1 else f'{name}: '}{', '.join(f'{share:.0%}' for share in each.shares.tolist())}"
        for name, each in findings.items()
        if each.shares is not None
    )
    caption = (
        "The first three principal components of the patches' tokens as red, green and blue, of all pictures together: "
        f"what has one colour is represented alike. Their shares of the variance: {shares}."
    )

    def tiles(name: str) -> list[np.ndarray]:
        return [colour_tile(_square(values)) for values in found[name]]

    columns = ["model", "picture", "row", "column", "red", "green", "blue"]
    drawn = _tiles_below(found, findings, tiles)
    return InspectionFigure("patch_colours", "Patches as colours", caption, *drawn, columns, rows)


def _tiles_below(
    found: dict[str, Tensor], findings: dict[str, Findings], tiles: Callable[[str], list[np.ndarray]]
) -> tuple[Callable[[Figure], None], int, int]:
    """Draws each model's pictures with a tile below each; also the figure's width and height."""

    def put(figure: Figure) -> None:
        for name, axes in zip(found, _panels(figure, 1, len(found)), strict=True):
            pictures = [picture_tile(picture) for picture in findings[name].pictures.numpy()]
            _show(axes, mosaic([pictures, tiles(name)]), name, findings)

    count, rows = len(findings[next(iter(found))].pictures), 2 * len(found)
    width = min(900, 150 * count + 20)
    return put, width, round(width / count * rows) + 10 * rows


def _by_patch(
    prefix: str, found: dict[str, Tensor], findings: dict[str, Findings]
) -> tuple[list[str], list[list[Value]]]:
    """Columns and rows of one number a patch, a row for each model and picture."""
    largest = max(findings[name].grid or 0 for name in found)
    rows: list[list[Value]] = [
        [name, picture, *map(_short, numbers.tolist())]
        for name, pictures in found.items()
        for picture, numbers in enumerate(pictures, 1)
    ]
    return ["model", "picture", *_grid_names(prefix, largest, largest)], rows


def _panels(figure: Figure, across: int, down: int = 1, *, shared: bool = False) -> list[Axes]:
    return list(figure.subplots(down, across, squeeze=False, sharey=shared).flat)


def _show(axes: Axes, pixels: np.ndarray, name: str, findings: dict[str, Findings], more: str = "") -> None:
    """Show pixels without axes, titled with the model's name if there are several models."""
    axes.imshow(pixels, interpolation="nearest")
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    _titled(axes, name, findings, more)


def _titled(axes: Axes, name: str, findings: dict[str, Findings], more: str = "") -> None:
    title = ", ".join(part for part in ([name] if len(findings) > 1 else []) + [more] if part)
    if title:
        axes.set_title(title)


def _scale(low: float, high: float) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(low, high), "viridis")


def _width(found: dict[str, Any]) -> int:
    return 560 if len(found) == 1 else _PANEL * len(found)


def _square(values: Tensor) -> np.ndarray:
    n = math.isqrt(len(values))
    return values.reshape(n, n, *values.shape[1:]).double().numpy()


def _grid_names(prefix: str, *sizes: int) -> Iterator[str]:
    for place in np.ndindex(*sizes):
        yield "_".join([prefix, *map(str, place)])


def _short(number: float) -> str:
    """A number with six digits, since further ones differ between machines."""
    return f"{number:.6g}"
