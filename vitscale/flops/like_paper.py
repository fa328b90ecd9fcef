"""TPUv3-core-days of the paper's Table 2: the utilisation they imply, and what the same runs cost on other devices."""

from collections.abc import Sequence

from vitscale.errors import RecipeError
from vitscale.flops.accounting import training_flops_per_image
from vitscale.flops.cost import Hardware, cost_row
from vitscale.flops.estimate import Estimate
from vitscale.flops.hardware import find_device
from vitscale.flops.matching import state_of_the_art_row
from vitscale.flops.published import StateOfTheArt, table_2
from vitscale.flops.reports import COST, EXAFLOPS, RECIPE, TRAINING_HOURS_SAY, energy_legend
from vitscale.table import Column, Row, View, number, percent, short

_COLUMNS = (
    RECIPE,
    Column("model", "model", is_text=True, spare=1),
    Column("pretraining", "pre-trained on", is_text=True, spare=2),
    Column("epochs", "epochs", short),
    EXAFLOPS,
    Column("tpuv3_core_days", "TPUv3\ncore-days", number(0)),
    Column("utilisation", "utilisation", percent(1)),
)
_TABLE_SAYS = (
    "TPUv3-core-days: Table 2. It does not say for how many epochs, so every length that Table 3 has is here; the "
    "longer ones fit the utilisation of ViT-H/14."
)
_HOURS_SAY = (
    "Hours: the paper's core-days, by the peaks of both devices, with all that its cores did beside training steps."
)


def like_paper_view(
    estimates: Sequence[Estimate], hardware: Hardware | None, mfu: float | None, *, whole_table: bool
) -> View:
    """Table 2's runs among the recipes, and with `whole_table` its models that have no recipe.

    Without `mfu` the hardware is as well used as the paper's was.
    """
    runs: list[tuple[StateOfTheArt, Estimate | None]] = []
    for published in table_2():
        found = [one for one in estimates if state_of_the_art_row(one.recipe, one.images) == published]
        runs += [(published, one) for one in found]
        if whole_table and not found:
            runs.append((published, None))
    if not runs:
        known = ", ".join(f"{row.model} on {row.pretraining}" for row in table_2())
        names = ", ".join(one.name for one in estimates)
        raise RecipeError(f"--like-paper: Table 2 has nothing of {names}; it has {known}")
    rows = [_row(published, one, hardware, mfu) for published, one in runs]
    legend = [_TABLE_SAYS]
    if hardware is not None:
        used = "As well used as the paper's cores" if mfu is None else f"{percent(1)(mfu)} MFU"
        hours = _HOURS_SAY if mfu is None else TRAINING_HOURS_SAY
        legend += [f"{hardware.describe()}. {used}.", hours, *energy_legend(hardware.device)]
    return View([*_COLUMNS, *(COST if hardware is not None else ())], rows, legend)


def _row(published: StateOfTheArt, one: Estimate | None, hardware: Hardware | None, mfu: float | None) -> Row:
    tpu_peak, _ = find_device("tpuv3").training_peak
    core_seconds = published.tpuv3_core_days * 86_400
    flops = (
        None
        if one is None or one.work is None or one.images is None
        else (training_flops_per_image(one.work.macs) * one.images)
    )
    row: Row = {
        "recipe": None if one is None else one.name,
        "model": published.model,
        "pretraining": published.pretraining,
        "epochs": None if one is None else one.epochs,
        "exaflops": None if one is None else one.exaflops,
        "tpuv3_core_days": published.tpuv3_core_days,
        "utilisation": None if flops is None else flops / (core_seconds * tpu_peak),
    }
    if hardware is None:
        return row
    peak, _ = hardware.device.training_peak
    if mfu is None:
        hours = core_seconds * tpu_peak / (peak * hardware.count) / 3600
    elif one is not None and one.work is not None and one.images is not None:
        hours = hardware.hours(one.work.macs, one.images, mfu)
    else:
        return row | {column.key: None for column in COST}
    return row | cost_row(hours, hours * hardware.count, hardware.device, hardware.price)
