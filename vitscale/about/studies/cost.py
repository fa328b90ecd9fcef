"""What a whole study costs, before it starts: exaFLOPs, device-hours, money."""

import json
from dataclasses import dataclass

from vitscale.about.studies.expansion import Entry, Expansion
from vitscale.about.studies.reading import Study
from vitscale.flops.accounting import cost_row, training_hours
from vitscale.flops.estimate import Estimate, estimate
from vitscale.flops.hardware import Device
from vitscale.ground.errors import RecipeError
from vitscale.recipe import Recipe, override


@dataclass(frozen=True)
class EntryCost:
    """The cost of one entry; None if nothing says how large its data are."""

    name: str
    exaflops: float | None = None  # model FLOPs of the run; for a branch, of the steps after its trunk's
    images: int | None = None  # that it trains on in these steps
    device_hours: float | None = None  # of training; evaluations and interruptions come on top
    saved_exaflops: float = 0.0  # of the steps that a branch takes over from its trunk
    problem: str = ""  # why something is None


@dataclass(frozen=True)
class StudyCost:
    """The cost of a study: sums over the entries whose cost is known."""

    entries: tuple[EntryCost, ...]
    exaflops: float
    device_hours: float
    energy_kwh: float | None
    cost: float | None  # device-hours times the price; None without a price

    @property
    def unknown(self) -> list[EntryCost]:
        """Entries that the sums do not include."""
        return [entry for entry in self.entries if entry.device_hours is None]

    @property
    def branches(self) -> list[EntryCost]:
        """Entries that continue another run from one of its steps."""
        return [entry for entry in self.entries if entry.saved_exaflops]

    @property
    def saved_exaflops(self) -> float:
        """exaFLOPs that the study would cost in addition if every run began at step 0."""
        return sum(entry.saved_exaflops for entry in self.entries)


def cost_of(
    study: Study, expansion: Expansion, device: Device, mfu: float, price: float | None, samples: int | None
) -> StudyCost:
    """Work out the cost of every entry on devices of which training is assumed to reach `mfu` of the peak.

    `price` is of one device for one hour, `samples` the size of a training set if neither a manifest nor the study
    gives it. Raises `RecipeError` if no entry's cost is known.
    """
    costs: dict[str, EntryCost] = {}
    for name, entry in expansion.entries.items():
        recipes = [option.recipe for option in entry.options]
        but_for_the_seed = {json.dumps(one.dump() | {"seed": None}, sort_keys=True): one for one in recipes}
        found = [_cost(name, _estimate(study, entry, one, samples), device, mfu) for one in but_for_the_seed.values()]
        costs[name] = max(found, key=lambda one: one.device_hours or -1.0)  # whichever wins
    if all(one.device_hours is None for one in costs.values()):
        first = next(iter(costs.values()))
        raise RecipeError(f"the size of the data is unknown for every run. The first, {first.name}: {first.problem}")
    device_hours = sum(one.device_hours or 0.0 for one in costs.values())
    row = cost_row(0.0, device_hours, device, price)
    entries, exaflops = tuple(costs.values()), sum(one.exaflops or 0.0 for one in costs.values())
    return StudyCost(entries, exaflops, device_hours, row["energy_kwh"], row["cost"])


def _cost(name: str, known: Estimate, device: Device, mfu: float) -> EntryCost:
    if known.work is None or known.own_images is None:
        return EntryCost(name, problem=str(known.problem))
    device_hours = training_hours(known.work.macs, known.own_images, device.training_peak[0], mfu)
    assert known.own_exaflops is not None and known.exaflops is not None
    saved = known.exaflops - known.own_exaflops
    return EntryCost(name, known.own_exaflops, known.own_images, device_hours, saved)


def _estimate(study: Study, entry: Entry, recipe: Recipe, samples: int | None) -> Estimate:
    """Estimate by the manifest, or the paper's data sets; else by what the study and the command line say."""
    found = estimate(entry.name, recipe)
    if found.work is not None and found.images is not None:
        return found
    splits = None if entry.dataset is None else study.parts[entry.part].datasets[entry.dataset]
    if splits is not None:
        samples = splits.samples or samples
        if splits.classes is not None and recipe.model.num_classes is None and recipe.objective.has_classes:
            recipe = override(recipe.dump(), [f"model.num_classes={splits.classes}"], entry.name)
    return estimate(entry.name, recipe, samples)
