"""The blocks of a recipe that watch a run: `anomalies`, `check`, `logging` and `profile`."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from vitscale.ground.block import Block

Policy = Literal["stop", "skip", "rewind"]
"""What to do with a batch that must not be trained on.

`stop` ends the run; `skip` leaves the batch out and uses the next one for its step; `rewind` goes back to the last
checkpoint and leaves out all batches since then.
"""


class Spike(Block):
    """A loss above the median of the last `window` by `factor` times their median absolute deviation x 1.4826.

    The deviation is taken as at least a thousandth of the median.
    """

    policy: Policy = Field("stop", description="what to do with its batch")
    window: int = Field(100, ge=5, le=10_000, description="number of preceding steps it is compared with")
    factor: float = Field(10.0, gt=0, description="threshold in deviations above the median")


class Anomalies(Block):
    """What to do with a step whose loss or gradient is not finite, or whose loss spikes."""

    non_finite: Policy = "stop"
    """stop ends the run; skip leaves the batch out; rewind returns to the last checkpoint and leaves out all batches
    since then"""
    spike: Spike | None = None
    limit: int = Field(10, ge=1, description="maximum number of skips and rewinds; the next one ends the run")


class Check(Block):
    """Detects devices that compute wrongly, wrong updates, and ranks that hang."""

    replicas_every: int | None = Field(1000, ge=1)
    """steps between comparisons of the ranks' weights; zero_stage 3 has no replicas"""
    recompute_every: int | None = Field(None, ge=1)
    """steps between micro-batches that all ranks compute to compare their bits"""
    audit_every: int | None = Field(1000, ge=1)
    """steps between audits, which check that the applied gradient is that of the batch, and that weights and optimizer
    state follow from it"""
    audit: Literal["stop", "warn"] = "stop"
    """on a failed audit: end the run (exit code 75), or only report it"""
    step_timeout_s: float = Field(600.0, gt=0, le=86400)
    """seconds without progress after which a rank ends the run"""


Tracker = Literal["tensorboard", "wandb", "mlflow", "comet_ml", "trackio", "swanlab", "aim", "clearml"]


class Logging(Block):
    """What is logged during training, and to which other programs."""

    most_s: ClassVar[float] = 30.0

    every: int = Field(50, ge=1)
    """steps between lines of metrics.jsonl; also a line after 30 s without one, at the first step of a process, and at
    every step that is evaluated or saved"""
    trackers: list[Tracker] = Field(["tensorboard"])
    """other programs that receive the metrics; each needs its package and its own set-up"""
    batch_digest: bool = Field(False, description="a checksum over every pixel of each global batch")

    @model_validator(mode="before")
    @classmethod
    def _older_form(cls, content: Any) -> Any:
        """Convert `tensorboard: true` or `false`, the form of recipes from before there were other trackers."""
        if not isinstance(content, dict) or not isinstance(content.get("tensorboard"), bool):
            return content
        trackers = content.get("trackers", cls.model_fields["trackers"].default)
        if isinstance(trackers, list):
            others = [name for name in trackers if name != "tensorboard"]
            trackers = ["tensorboard", *others] if content["tensorboard"] else others
        return {key: value for key, value in content.items() if key != "tensorboard"} | {"trackers": trackers}

    def _contradictions(self) -> Iterator[str]:
        if len(set(self.trackers)) != len(self.trackers):
            yield f"trackers: {self.trackers} has one twice"


class Profile(Block):
    """A profile of some steps: a trace and a table in the run directory."""

    steps: int = Field(0, ge=0, le=100)
    """number of steps to profile, from a process's fourth step on; 0: none"""
