"""What a whole study costs, before it starts: exaFLOPs, hours on given devices, money."""

import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitscale.about.planning.cluster import Cluster
from vitscale.about.planning.plan import ClusterPlan, make_plan
from vitscale.about.studies.expansion import Entry, Expansion
from vitscale.about.studies.reading import Study
from vitscale.flops.accounting import cost_row
from vitscale.flops.estimate import Estimate, estimate
from vitscale.ground.errors import RecipeError
from vitscale.recipe import Recipe, override

# Keys of a recipe that do not affect a run's speed.
_OF_NO_MATTER = ("seed", "init", "schedule", "evaluation", "selection", "checkpoint", "anomalies", "check", "logging")


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
    assumptions: tuple[str, ...]  # those of the plans behind the hours

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


def cost_of(
    study: Study, expansion: Expansion, cluster: Cluster, slots: int, samples: int | None, say: Callable[[str], None]
) -> StudyCost:
    """Work out the cost of every entry, `slots` at a time, each on the devices of a `cluster`.

    `samples` is the size of a training set if neither a manifest nor the study gives it. `say` is called with the plan
    that is being made, as one takes seconds.

    Raises `RecipeError` if the devices of a slot do not divide a global batch, a recipe cannot be planned, or no
    entry's cost is known.
    """
    plans: dict[str, ClusterPlan] = {}
    costs: dict[str, EntryCost] = {}
    for name, entry in expansion.entries.items():
        found = [
            _cost(name, _estimate(study, entry, option.recipe, samples), cluster, plans, say)
            for option in {_key(option.recipe, ("seed",)): option for option in entry.options}.values()
        ]
        costs[name] = max(found, key=lambda one: (one.hours is not None, one.hours or 0.0))  # whichever wins
    if all(one.hours is None for one in costs.values()):
        first = next(iter(costs.values()))
        raise RecipeError(f"the size of the data is unknown for every run. The first, {first.name}: {first.problem}")
    hours = _makespan([*expansion.entries.values()], {name: one.hours or 0.0 for name, one in costs.items()}, slots)
    device_hours = sum(one.device_hours or 0.0 for one in costs.values())
    row = cost_row(hours, device_hours, cluster.device, cluster.price)
    entries, exaflops = tuple(costs.values()), sum(one.exaflops or 0.0 for one in costs.values())
    assumptions = tuple(dict.fromkeys(line for plan in plans.values() for line in plan.assumptions))
    return StudyCost(entries, exaflops, hours, device_hours, row["energy_kwh"], row["cost"], assumptions)


def _cost(
    name: str, known: Estimate, cluster: Cluster, plans: dict[str, ClusterPlan], say: Callable[[str], None]
) -> EntryCost:
    if known.work is None or known.images is None:
        return EntryCost(name, problem=str(known.problem))
    key = _key(known.recipe, _OF_NO_MATTER)
    if key not in plans:
        say(f"planning {known.model_name}")
        known.recipe.split(cluster.devices)
        plans[key] = make_plan(known, cluster)
    best = plans[key].best
    if best is None:
        raise RecipeError(
            f"{name}: {known.model_name} does not fit into {cluster.devices} {cluster.device.name}; more devices "
            "per entry (fewer --slots) may help"
        )
    assert known.own_images is not None and known.own_exaflops is not None and known.exaflops is not None
    hours = known.own_images / best.images_per_s / 3600
    saved = known.exaflops - known.own_exaflops
    return EntryCost(name, known.own_exaflops, known.own_images, hours, hours * cluster.devices, saved)


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


def _key(recipe: Recipe, without: Sequence[str]) -> str:
    content = {key: value for key, value in recipe.dump().items() if key not in without}
    if "schedule" in without:
        content["data"] = recipe.data.image_size
        content["optimizer"] = {key: value for key, value in content["optimizer"].items() if key != "lr"}
    return json.dumps(content, sort_keys=True)


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
