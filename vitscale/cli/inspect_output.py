"""What `vitscale inspect` does and prints."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from vitscale.cli.prediction import image_files, pictures_of
from vitscale.errors import DataError, RecipeError
from vitscale.evaluation.finished import FinishedModel
from vitscale.evaluation.placing import join
from vitscale.files.durable import new_folder
from vitscale.inspection.figures import inspection_figures
from vitscale.inspection.looking import PARTS, Findings, Part, look, parts_of
from vitscale.inspection.output import PAGE, write
from vitscale.inspection.representation import nearest
from vitscale.inspection.speed import Throughput, speed_figure, throughputs
from vitscale.page import check_drawing
from vitscale.shards import MANIFEST_NAME

if TYPE_CHECKING:
    from vitscale.shards import Manifest

_NEIGHBOURS = 6
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
    """Look at models and write the folder. Raises `RecipeError` and `DataError` for what people gave."""
    check_drawing("vitscale inspect")
    wanted = _parts(show)
    names = _names(sources)
    with new_folder(out, "--out") as folder:
        findings: dict[str, Findings] = {}
        facts, notes = [], []
        for source, name in zip(sources, names, strict=True):
            with open_model(source) as model:
                if model.accelerator.num_processes > 1:
                    raise RecipeError("vitscale inspect is one process; start it without accelerate launch")
                found, about = _look(model, name, images, wanted, count, pictures, neighbours)
            findings[name] = found
            facts.append((name, about))
            if wanted is None and (absent := [part for part in PARTS if part not in found.parts]):
                notes.append(f"{name} has no {' and no '.join(absent)}.")
        figures = inspection_figures(findings)
        facts.append(("pictures", f"{', '.join(str(each.images) for each in findings.values())} of {images}"))
        title = "Inside " + " and ".join(names)
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
    """What the models are called in the figures: the shortest ends of their paths that tell them apart."""
    parts = [source.absolute().with_suffix("").parts for source in sources]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise RecipeError(f"{sources[0]}: the same model twice; expected different ones")


def _look(
    model: FinishedModel,
    name: str,
    images: str,
    wanted: list[Part] | None,
    count: int,
    pictures: int,
    neighbours: str | None,
) -> tuple[Findings, str]:
    with model.reading(model.backbone.anatomy().embedding):
        parts = parts_of(model.backbone, model.title, wanted)
        shown, uids, dataset = _pictures(model, images, count)
        among = model.dataset(neighbours) if neighbours is not None else None
        with _progress(f"{name}: pictures", len(shown)) as seen:
            found = look(model.backbone, model.predict, shown, model.title, parts, pictures=pictures, seen=seen)
    if among is not None and found.representations is not None:
        own = uids[: len(found.pictures)] if dataset is not None and dataset.sha256 == among.sha256 else None
        own = torch.full((len(found.pictures),), -1) if own is None else own
        with _progress(f"{name}: neighbours", among.num_samples) as seen:
            found.neighbours = nearest(found.representations, own, _represented(model, among, seen), _NEIGHBOURS)
    where = f"{model.title}, {model.image_size} pixels"
    return found, where if model.step is None else f"{where}, step {model.step:,}"


def _pictures(model: FinishedModel, where: str, count: int) -> tuple[Tensor, Tensor, "Manifest | None"]:
    """uint8 (n, S, S, 3) as the model sees them, their uids (n,), and the dataset where they are of one."""
    path = Path(where)
    if path.is_file() or (path.is_dir() and not (path / MANIFEST_NAME).exists()):
        files = image_files([path])
        files = [files[at * len(files) // count] for at in range(count)] if len(files) > count else files
        shown = pictures_of(model, files)
        return shown, torch.full((len(shown),), -1), None
    manifest = model.dataset(where)
    images, uids, found = [], [], 0
    with closing(model.loader(manifest)()) as loader:
        for batch in loader:
            images.append(batch.images[batch.mask].clone())
            uids.append(batch.uids[batch.mask].clone())
            found += len(images[-1])
            if found >= count:
                break
    if not found:
        raise DataError(f"--images {where}: no picture in it can be read")
    return torch.cat(images)[:count], torch.cat(uids)[:count], manifest


def _represented(
    model: FinishedModel, manifest: "Manifest", seen: Callable[[int], None]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for batch in model.loader(manifest)():
        pooled = model.predict(batch.images).pooled.cpu()
        yield batch.images[batch.mask], pooled[batch.mask], batch.uids[batch.mask]
        seen(int(batch.mask.sum()))


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A live line at a terminal, on standard error."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def run_speed(
    names: Sequence[str], out: Path, sizes: str, precision: Literal["bf16", "fp32"] | None, seconds: float
) -> None:
    """Measure models and write the folder. Raises `RecipeError` for what people gave."""
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
