"""What `vitscale inspect` does and prints."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitscale.evaluation.finished import FinishedModel
from vitscale.evaluation.inspection.figures import inspection_figures
from vitscale.evaluation.inspection.finished import inspect_model, pictures_from
from vitscale.evaluation.inspection.looking import PARTS, Findings, Part
from vitscale.evaluation.inspection.output import PAGE, write
from vitscale.evaluation.inspection.speed import Throughput, speed_figure, throughputs
from vitscale.evaluation.placing import join
from vitscale.ground.errors import RecipeError
from vitscale.ground.files.durable import new_folder
from vitscale.ground.page import check_drawing
from vitscale.ground.table import Console

Open = Callable[[Path], AbstractContextManager[FinishedModel]]


def run_inspect(
    sources: Sequence[Path],
    open_model: Open,
    images: str,
    out: Path,
    show: str | None,
    count: int,
    pictures: int,
    neighbours: str | None,
) -> None:
    """Inspect models and write the folder. Raises `RecipeError` and `DataError` for bad arguments and images."""
    check_drawing("vitscale inspect")
    wanted = _parts(show)
    names = _names(sources)
    with new_folder(out, "--out") as folder:
        findings: dict[str, Findings] = {}
        facts, notes = [], []
        for source, name in zip(sources, names, strict=True):
            with open_model(source) as model:
                seen, progress = pictures_from(model, images, count), partial(_progress, name)
                found = inspect_model(model, seen, wanted, pictures=pictures, neighbours=neighbours, progress=progress)
                step = "" if model.step is None else f", step {model.step:,}"
            findings[name] = found
            facts.append((name, f"{found.title}, {found.image_size} pixels{step}"))
            if wanted is None and (absent := [part for part in PARTS if part not in found.parts]):
                notes.append(f"{name} has no {' and no '.join(absent)}.")
        figures = inspection_figures(findings)
        facts.append(("pictures", f"{', '.join(str(each.images) for each in findings.values())} of {images}"))
        title = "Inside " + " and ".join(names)
        with Console(stderr=True).status("drawing"):  # seen on a terminal only
            write(folder, figures, title, ", ".join(each.title for each in findings.values()), facts, notes)
    for figure in figures:
        print(f"{figure.key:<20} {figure.title}")
    print(f"wrote {out / PAGE}: {len(figures)} figures, each as PNG, SVG and CSV")


def _parts(show: str | None) -> list[Part] | None:
    if show is None:
        return None
    if unknown := [part for part in show.split(",") if part not in PARTS]:
        raise RecipeError(f"--show: {unknown[0]!r} is none; expected some of {','.join(PARTS)}")
    return [part for part in PARTS if part in show.split(",")]


def _names(sources: Sequence[Path]) -> list[str]:
    """The models' names in the figures: the shortest ends of their paths that tell them apart."""
    whole = [source.absolute() for source in sources]
    if len(set(whole)) < len(whole):
        raise RecipeError(f"{max(whole, key=whole.count)} is given twice; expected different models")
    for paths in ([path.with_suffix("") if path.is_file() else path for path in whole], whole):
        for length in range(1, max(len(path.parts) for path in paths) + 1):
            names = ["/".join(path.parts[-length:]) for path in paths]
            if len(set(names)) == len(names):
                return names
    raise AssertionError("different paths have different names")


@contextmanager
def _progress(name: str, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{name}: {what}", total=total)
        yield lambda count: progress.advance(task, count)


def run_speed(
    names: Sequence[str], out: Path, sizes: str, precision: Literal["bf16", "fp32"] | None, seconds: float
) -> None:
    """Measure models and write the folder. Raises `RecipeError` for bad arguments."""
    check_drawing("vitscale inspect speed")
    sides = _sizes(sizes)
    device = join().device
    precision = precision or ("bf16" if device.type == "cuda" else "fp32")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{where}, {precision}")
    with new_folder(out, "--out") as folder:
        found = throughputs(names, sides, device, precision, seconds, _print)
        figure = speed_figure(found, where, precision)
        write(folder, [figure], figure.title, where, [("device", where), ("precision", precision)])
    print(f"wrote {out / PAGE}")


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if not all(0 < size <= 8192 for size in sizes) or len(set(sizes)) < len(sizes):
        raise RecipeError(f"--sizes {text}: expected different numbers of pixels, such as 64,128,224")
    return sizes


def _print(found: Throughput) -> None:
    if found.images_per_s is None:
        print(f"{found.model:<16} {found.image_size:>5}  {found.problem}", flush=True)
        return
    largest = "" if found.largest_batch is None else f"  largest batch {found.largest_batch:,}"
    speed = f"{found.images_per_s:>10,.4g} images/s at batch {found.batch:,}"
    print(f"{found.model:<16} {found.image_size:>5} {speed}{largest}", flush=True)
