"""DONE, which marks a run as finished and holds its result; verified.json, which holds what a verification found."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vitscale.ground.files.digests import file_digests
from vitscale.ground.files.durable import write_text
from vitscale.ground.wording import finite
from vitscale.runs.names import DONE_FILE, INDEX_FILE, METRICS_FILE, RECIPE_FILE, VERIFIED_FILE
from vitscale.runs.reading import read_object


def read_done(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a finished run; None if the run is not finished, or its summary is damaged."""
    return read_object(run_dir / DONE_FILE)


def write_done(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Mark a run as finished. Raises OSError.

    The summary has `step`, `total_steps`, `stopped_early`, `best_step`, `exaflops`, and `evaluation`, the last
    evaluation's values by evaluator/metric.
    """
    write_text(run_dir / DONE_FILE, json.dumps(finite(summary), indent=1, allow_nan=False) + "\n")


def covered_files(run_dir: Path, checkpoints: str) -> dict[str, str]:
    """The files that a verification covers, as they are now: name -> sha256. What is not on this machine is left out.

    `checkpoints` is the path or URL of the checkpoints, whose indices, which are listed, have the digests of the rest.
    """
    indices = sorted(Path(checkpoints).glob(f"step-*/{INDEX_FILE}"))
    files = {name: run_dir / name for name in (RECIPE_FILE, METRICS_FILE, DONE_FILE)}
    files |= {f"checkpoints/{path.parent.name}/{path.name}": path for path in indices if _is_small(path)}
    return {name: file_digests(path).sha256 for name, path in files.items() if path.is_file()}


def _is_small(path: Path) -> bool:
    return path.is_file() and path.stat().st_size < 64 << 20  # as any index is: holes make terabytes


def write_verified(run_dir: Path, outcome: Mapping[str, Any]) -> None:
    """Write what a verification found beside the run. Raises OSError.

    The outcome has `exit_code`, `findings` (each `what`, `is_sound`, `detail`), `asked`, `versions`, and `files` as
    they were when it began.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_text(run_dir / VERIFIED_FILE, json.dumps({"version": 1, "time": now, **outcome}, indent=1) + "\n")


def verification(run_dir: Path, checkpoints: str) -> str:
    """What `vitscale verify` found when it was last run, in one line that begins with `yes` or `no`."""
    try:
        outcome = read_object(run_dir / VERIFIED_FILE) or {}
        findings, files, by = outcome["findings"], outcome["files"], outcome["versions"]["vitscale"]
        when = f"{outcome['time'][:10]} by vitscale {by}"
        bad = [each["what"] for each in findings if each["is_sound"] is False]
        missed = [f"{each['what']}: {each['detail']}" for each in findings if each["is_sound"] is None]
        now = covered_files(run_dir, checkpoints)
        if changed := sorted(name for name in {*files, *now} if files.get(name) != now.get(name)):
            return f"no: verified on {when}, then changed: {', '.join(changed[:3])}"
        if outcome["exit_code"] or bad:
            return f"no: on {when}, not what it says: {', '.join(bad) or 'not everything was looked at'}"
        return f"yes, on {when}" + "".join(f"; {each}" for each in missed)
    except (KeyError, TypeError, AttributeError, OSError):
        return "no"
