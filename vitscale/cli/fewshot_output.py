"""`vitscale fewshot`: what its options mean, and its table."""

from typing import Any

from vitscale.evaluation.representation import PAPERS_L2, Method, Strength, default_counts
from vitscale.ground.errors import RecipeError


def counts_of(shots: str | None, method: Method) -> list[int | None]:
    """The numbers of samples per class that `--shots` asks for, with None for all samples. Raises `RecipeError`."""
    if shots is None:
        return default_counts(method)
    found: list[int | None] = []
    for word in shots.split(","):
        if word != "all" and not (word.isascii() and word.isdecimal() and 0 < int(word) < 2**31):
            raise RecipeError(f"--shots {shots}: {word!r} is none; expected numbers of samples, or all: 1,5,10,all")
        found.append(None if word == "all" else int(word))
    if len(set(found)) != len(found):
        raise RecipeError(f"--shots {shots}: one is there twice")
    return found


def strength_of(l2: str | None, tasks: int) -> Strength:
    """The L2 strength, or the way to choose it, that `--l2` asks for. Raises `RecipeError`."""
    if l2 is None:
        return PAPERS_L2
    if l2 in ("shared", "others"):
        if l2 == "others" and tasks < 2:
            raise RecipeError("--l2 others: chosen on the other tasks, and there is one; give more --train and --test")
        return "shared" if l2 == "shared" else "others"
    try:
        value = float(l2)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise RecipeError(f"--l2 {l2}: expected a number above 0, shared or others")
    return value


def table_of(found: dict[str, Any]) -> str:
    """The results as text for people."""
    lines = []
    for name, task in found["tasks"].items():
        lines.append(f"{name}: {task['train_samples']:,} training, {task['test_samples']:,} test samples")
        for key, value in task.items():
            if not isinstance(value, dict):
                continue
            spread = f" +- {value['std']:.4f} over {value['draws']} draws" if value["draws"] > 1 else ""
            said = [word for word in ("l2", "C", "lr", "blocks") if isinstance(value.get(word), float | int)]
            more = "".join(f", {word} {value[word]:g}" for word in said)
            more += ", mean of patches" if value.get("patches") is True else ""
            scarce = value.get("scarce_classes")
            more += f"; {scarce} classes have fewer samples and give what they have" if scarce else ""
            lines.append(f"  {key:<12} {value['mean']:.4f}{spread}{more}")
    return "\n".join(lines)
