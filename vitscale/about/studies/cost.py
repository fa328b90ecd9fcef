"""What a whole study costs, before it starts: exaFLOPs, hours on given devices, money."""

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.about.studies.expansion import Entry, Expansion
from vitscale.about.studies.reading import Study
from vitscale.flops.accounting import cost_row, training_hours
from vitscale.flops.estimate import Estimate, estimate
from vitscale.flops.hardware import Device
from vitscale.ground.errors import RecipeError
from vitscale.recipe import Recipe, override


@dataclass(frozen=True)
class Slot:
    """The devices of one entry, and the share of their peak that training is assumed to reach."""

    device: Device
    devices: int
    mfu: float
    price: float | None = None  # of one device for one hour


@dataclass(frozen=True)
class EntryCost:
    """The cost of one entry on its slot; None if nothing says how large its data are."""

    name: str
    exaflops: float | None = None  # model FLOPs of the run; for a branch, of the steps after its trunk's
    images: int | None = None  # that it trains on in these steps
    hours: float | None = None  # of training; evaluations and interruptions come on top
    device_hours: float | None = None  # the same hours, summed over the slot's devices
    saved_exaflops: float = 0.0  # of the steps that a branch takes over from its trunk
    problem: str = ""  # why something is None


@dataclass(frozen=True)
class StudyCost:
    """The cost of a study: sums over the entries whose cost is known."""

    entries: tuple[EntryCost, ...]
    exaflops: float
    hours: float  # from the first entry's start to the last one's end, each after those it depends on
    device_hours: float
    energy_kwh: float | None
    cost: float | None  # device-hours times the price; None without a price

    @property
    def unknown(self) -> list[EntryCost]:
        """Entries that the sums do not include."""
        return [entry for entry in self.entries if entry.hours is None]

    @property
    def branches(self) -> list[EntryCost]:
        """Entries that continue another run from one of its steps."""
        return [entry for entry in self.entries if entry.saved_exaflops]

    @property
    def saved_exaflops(self) -> float:
        """exaFLOPs that the study would cost in addition if every run began at step 0."""
        return sum(entry.saved_exaflops for entry in self.entries)


def cost_of(study: Study, expansion: Expansion, slot: Slot, slots: int, samples: int | None) -> StudyCost:
    """Work out the cost of every entry, `slots` at a time.

    `samples` is the size of a training set if neither a manifest nor the study gives it.

    Raises `RecipeError` if the devices of a slot do not divide a global batch, or no entry's cost is known.
    """
    costs: dict[str, EntryCost] = {}
    for name, entry in expansion.entries.items():
        found = [
            _cost(name, _estimate(study, entry, recipe, samples), slot)
            for recipe in {_but_for_the_seed(option.recipe): option.recipe for option in entry.options}.values()
        ]
        costs[name] = max(found, key=lambda one: (one.hours is not None, one.hours or 0.0))  # whichever wins
    if all(one.hours is None for one in costs.values()):
        first = next(iter(costs.values()))
        raise RecipeError(f"the size of the data is unknown for every run. The first, {first.name}: {first.problem}")
    hours = _makespan([*expansion.entries.values()], {name: one.hours or 0.0 for name, one in costs.items()}, slots)
    device_hours = sum(one.device_hours or 0.0 for one in costs.values())
    row = cost_row(hours, device_hours, slot.device, slot.price)
    entries, exaflops = tuple(costs.values()), sum(one.exaflops or 0.0 for one in costs.values())
    return StudyCost(entries, exaflops, hours, device_hours, row["energy_kwh"], row["cost"])


def _cost(name: str, known: Estimate, slot: Slot) -> EntryCost:
    if known.work is None or known.own_images is None:
        return EntryCost(name, problem=str(known.problem))
    known.recipe.split(slot.devices)
    peak, _ = slot.device.training_peak
    hours = training_hours(known.work.macs, known.own_images, slot.devices * peak, slot.mfu)
    assert known.own_exaflops is not None and known.exaflops is not None
    saved = known.exaflops - known.own_exaflops
    return EntryCost(name, known.own_exaflops, known.own_images, hours, hours * slot.devices, saved)


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


def _but_for_the_seed(recipe: Recipe) -> str:
    return json.dumps(recipe.dump() | {"seed": None}, sort_keys=True)


def _makespan(entries: Sequence[Entry], hours: dict[str, float], slots: int) -> float:
    """The hour at which the last entry ends, if each starts in the study's order once it and a slot are ready."""
    ends: dict[str, float] = {}
    free = [0.0] * slots
    for entry in entries:
        ready = max((ends[name] for name in entry.depends_on), default=0.0)
        start = max(heapq.heappop(free), ready)
        ends[entry.name] = start + hours[entry.name]
        heapq.heappush(free, ends[entry.name])
    return max(ends.values(), default=0.0)
