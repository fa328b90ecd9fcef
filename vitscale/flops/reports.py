"""What `vitscale-flops` reports on recipes: the grid, where the FLOPs go, what a budget buys, hours and money."""

from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.flops.accounting import FORWARD_PASSES_PER_TRAINING_STEP, cost_row, training_hours
from vitscale.flops.estimate import Estimate
from vitscale.flops.hardware import Device
from vitscale.flops.matching import position_row, possible_epochs, transfer_row
from vitscale.flops.published import DataSize
from vitscale.ground.errors import RecipeError
from vitscale.ground.table import Column, ResultTable, Row, number, percent, short


@dataclass(frozen=True)
class Hardware:
    """The devices that a run is to be computed on, and the price of one of them for an hour, in any currency."""

    device: Device
    count: int
    price: float | None = None


_RECIPE = Column("recipe", "recipe", is_text=True)
_EXAFLOPS = Column("exaflops", "exaFLOPs", number(1))
_MODEL = Column("model", "model", is_text=True, spare=5)
_EPOCHS = Column("epochs", "epochs", short, spare=7)
_GRID = (
    _RECIPE,
    _MODEL,
    _EPOCHS,
    Column("tokens", "tokens", number(0), spare=2),
    Column("params", "params\n(M)", number(1, 1e6)),
    Column("gmacs", "GMACs\n/image", number(2)),
    Column("accounting_gmacs", "acct.\nGMACs", number(2), spare=6),
    Column("images", "images\n(M)", number(0, 1e6), spare=1),
    _EXAFLOPS,
    Column("published_exaflops", "paper", number(0)),
    Column("published_first_exaflops", "first\nposted", number(0), spare=4),
    Column("deviation", "deviation", percent(1, "+")),
)
_BREAKDOWN = (
    _RECIPE,
    Column("part", "part", is_text=True),
    Column("params", "params", number(0)),
    Column("gmacs", "GMACs\n/image", number(3)),
    Column("accounting_gmacs", "accounting\nGMACs", number(3), spare=1),
    _EXAFLOPS,
    Column("share", "share", percent(1)),
)
_RESULTS = (
    Column("budget_share", "of budget", percent(0), spare=4),
    Column("imagenet", "ImageNet", number(2)),
    Column("average_5", "average-5", number(2)),
    Column("imagenet_5shot", "5-shot", percent(2)),
    Column("table", "table", number(0), spare=3),
    Column("result_of_epochs", "of epochs", is_text=True),
)
COST = (
    Column("hours", "hours", number(1)),
    Column("device_hours", "device\nhours", number(0)),
    Column("energy_kwh", "kWh", number(0), spare=1),
    Column("cost", "cost", number(0)),
)

_ACCOUNTING_SAYS = (
    "exaFLOPs: 3 passes x 2 FLOPs x accounting MACs x images. Accounting MACs leave out the taps on zero padding, "
    "which GMACs/image count, as timm and torch do."
)
_PAPER_SAYS = "paper: the corrected Table 6, and the figures first posted, which it replaced."
_RESULTS_SAY = (
    "Top-1 in percent that the paper reports: ImageNet and average-5 (with CIFAR-10, CIFAR-100, Pets, Flowers) after "
    "fine-tuning, 5-shot on ImageNet in Table 8. Where a table does not say how long the run was, 'of epochs' has the "
    "lengths that it may be of: the shorter run may well do worse."
)
_OUTLIERS_SAY = (
    "Beyond 1.5 %: the paper's figure of ViT-B/32 fits 49 tokens, without the class token; those of R50+ViT-L/16 for 7 "
    "and for 14 epochs contradict each other."
)
_TRAINING_HOURS_SAY = "Hours: of training steps alone, without evaluation and checkpoints."


def grid_table(estimates: Sequence[Estimate]) -> ResultTable:
    """Every recipe beside what the paper publishes about it."""
    rows: list[Row] = []
    for one in estimates:
        work, published = one.work, one.published
        rows.append(
            {
                "recipe": one.name,
                "model": one.recipe.model.describe(),
                "epochs": one.epochs,
                "tokens": one.tokens,
                "params": None if work is None else work.params,
                "gmacs": None if work is None else work.macs / 1e9,
                "accounting_gmacs": None if work is None else work.accounting_macs / 1e9,
                "images": one.images,
                "exaflops": one.exaflops,
                "published_exaflops": None if published is None else published.exaflops,
                "published_first_exaflops": None if published is None else published.exaflops_first_posted,
                "deviation": one.deviation,
            }
        )
    is_compared = [one.published is not None for one in estimates]
    compared = sum(is_compared)
    groups = (compared,) if all(is_compared[:compared]) else ()
    legend = [_ACCOUNTING_SAYS, *([_PAPER_SAYS] if compared else [])]
    if any(abs(one.deviation or 0) > 0.015 for one in estimates):
        legend.append(_OUTLIERS_SAY)
    return ResultTable(_GRID, rows, legend, _notes(estimates), groups)


def breakdown_table(estimates: Sequence[Estimate]) -> ResultTable:
    """Where MACs, FLOPs and parameters are; after model FLOPs, what recomputing activations adds to them."""
    groups = [_parts(one) for one in estimates]
    rows = [row for group in groups for row in group]
    return ResultTable(_BREAKDOWN, rows, [_ACCOUNTING_SAYS], _notes(estimates), [len(group) for group in groups])


def _parts(one: Estimate) -> list[Row]:
    if one.work is None:
        return []
    again = one.recomputed
    counted = [(part, work, one.exaflops_of(work)) for part, work in one.work.parts().items()]
    counted.append(("model FLOPs", one.work, one.exaflops))
    if again.operations:
        counted.append(("recomputed", again, one.recomputed_exaflops))
    rows: list[Row] = [
        {
            "recipe": one.name,
            "part": part,
            "params": work.params if part != "recomputed" else None,
            "gmacs": work.macs / 1e9,
            "accounting_gmacs": work.accounting_macs / 1e9,
            "exaflops": exaflops,
            "share": work.accounting_macs / one.work.accounting_macs if part != "recomputed" else None,
        }
        for part, work, exaflops in counted
    ]
    if again.operations:
        whole = {"recipe": one.name, "part": "hardware FLOPs", "exaflops": one.hardware_exaflops}
        rows.append({column.key: None for column in _BREAKDOWN} | whole)
    return rows


def purchase_table(
    estimates: Sequence[Estimate], budget: float | None, hardware: Hardware | None, mfu: float | None
) -> ResultTable:
    """The recipes that fit in a budget of exaFLOPs, the best by the paper's results first; and their cost.

    Without a budget, all of them in their order; without hardware, no cost.
    """
    columns, legend = [_RECIPE, _MODEL, _EPOCHS, _EXAFLOPS], []
    notes: list[str] = []
    if budget is not None:
        columns += _RESULTS
        legend.append(_RESULTS_SAY)
        known = [(one.exaflops, one) for one in estimates if one.exaflops is not None]
        notes = _unknown(estimates)
        estimates = [one for exaflops, one in known if exaflops <= budget]
        if known and not estimates:
            least, smallest = min(known, key=lambda pair: pair[0])
            notes.append(f"Nothing fits in {budget:g} exaFLOPs; the smallest is {smallest.name} with {least:.3g}.")
    bought = [(one, _purchase_row(one, budget)) for one in estimates]
    if budget is not None:
        keys = ("imagenet", "imagenet_5shot", "exaflops")
        bought.sort(key=lambda pair: [pair[1][key] or 0.0 for key in keys], reverse=True)
    if hardware is not None and mfu is not None:
        columns += COST
        for one, row in bought:
            row |= _cost_row(one, hardware, mfu)
        devices = f"{hardware.count:,} x {hardware.device.describe()}"
        legend += [f"{devices}. {percent(1)(mfu)} MFU: of model FLOPs, padding counted.", _TRAINING_HOURS_SAY]
        legend += energy_legend(hardware.device)
        notes += _cost_notes(estimates, hardware, mfu)
    return ResultTable(columns, [row for _, row in bought], legend, [*notes, *_notes(estimates)])


def _purchase_row(one: Estimate, budget: float | None) -> Row:
    row: Row = {"recipe": one.name, "model": one.recipe.model.describe()}
    row |= {"epochs": one.epochs, "exaflops": one.exaflops}
    if budget is None or one.exaflops is None:
        return row
    found, position = transfer_row(one.recipe, one.images), position_row(one.recipe, one.images)
    lengths = possible_epochs(found[1]) if found is not None and isinstance(found[1], DataSize) else ()
    return row | {
        "budget_share": one.exaflops / budget,
        "imagenet": None if found is None else found[1].imagenet,
        "average_5": None if found is None else found[1].average_5,
        "imagenet_5shot": None if position is None else position.imagenet_5shot,
        "table": 8 if found is None and position is not None else None if found is None else found[0],
        "result_of_epochs": " or ".join(map(str, lengths)) if len(lengths) > 1 else None,
    }


def _cost_row(one: Estimate, hardware: Hardware, mfu: float) -> Row:
    """What training costs at a utilisation, without evaluation, checkpoints and interruptions."""
    if one.work is None or one.images is None:
        return {column.key: None for column in COST}
    peak, _ = hardware.device.training_peak
    hours = training_hours(one.work.macs, one.images, hardware.count * peak, mfu)
    return cost_row(hours, hours * hardware.count, hardware.device, hardware.price)


def energy_legend(device: Device | None) -> list[str]:
    """What kWh means, if there are any."""
    known = device is not None and device.watts is not None
    return ["kWh: what the devices draw at most, without hosts and cooling."] if known else []


def _cost_notes(estimates: Sequence[Estimate], hardware: Hardware, mfu: float) -> list[str]:
    notes = []
    _, dtype = hardware.device.training_peak
    other = sorted({one.recipe.precision for one in estimates} - {dtype, "auto"})
    if other:
        notes.append(f"The peak is of {dtype}, and recipes compute in {', '.join(other)}: the MFU must be meant so.")
    for one in estimates:
        if one.work is not None and one.recomputed.operations:
            share = one.recomputed.macs / (FORWARD_PASSES_PER_TRAINING_STEP * one.work.macs)
            notes.append(f"{one.name}: with what it recomputes, {percent(1)(mfu * (1 + share))} of the peak (HFU)")
    return notes


def _notes(estimates: Sequence[Estimate]) -> list[str]:
    """Notes on what is missing and why, what is recomputed, and what part of an image is not seen."""
    notes = _unknown(estimates)
    for one in estimates:
        if one.images == 0:
            length, batch = one.recipe.schedule.duration.describe(), one.recipe.batch.global_size
            samples = "" if one.samples is None else f" of {one.samples:,} samples"
            notes.append(f"{one.name} is a run of 0 steps: {length}{samples}, in batches of {batch:,}")
        if one.recomputed_exaflops and one.exaflops is not None:
            every = one.recipe.parallelism.activation_checkpointing
            blocks = "every block" if every == 1 else f"one block in {every}"
            notes.append(
                f"{one.name} recomputes the activations of {blocks}: {one.exaflops:,.1f} exaFLOPs of model FLOPs are "
                f"{one.hardware_exaflops:,.1f} of hardware FLOPs"
            )
        border = one.recipe.describe_border()
        notes += [f"{one.name}: {border}"] if border else []
    return notes


def _unknown(estimates: Sequence[Estimate]) -> list[str]:
    names: dict[str, list[str]] = {}
    for one in estimates:
        if one.problem is not None:
            names.setdefault(_stand_ins(one), []).append(one.name)
    return [
        f"{', '.join(concerned)}: no figures without the dataset (--set data.root=DIR), unless {stand_ins} for it."
        for stand_ins, concerned in names.items()
    ]


def check_known(one: Estimate) -> None:
    """Raise `RecipeError` if something keeps a recipe from being worked out."""
    if one.problem is not None:
        raise RecipeError(f"{one.name}: {one.problem}. Without the dataset, {_stand_ins(one)} for it")


def _stand_ins(one: Estimate) -> str:
    """The options that can replace the dataset, for what is not known."""
    options = ["--samples N"] * (one.images is None) + ["--set model.num_classes=K"] * (one.work is None)
    return f"{' and '.join(options)} stand{'s' if len(options) == 1 else ''} in"
