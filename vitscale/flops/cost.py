"""From model FLOPs to hours, energy and money on given devices. Nothing is assumed: the utilisation is given."""

from dataclasses import dataclass

from vitscale.flops.accounting import training_flops_per_image
from vitscale.flops.hardware import Device


@dataclass(frozen=True)
class Hardware:
    """The devices that a run is to be computed on, and the price of one of them for an hour, in any currency."""

    device: Device
    count: int
    price: float | None = None

    def hours(self, macs: int, images: int, mfu: float) -> float:
        """Hours of training on `images`, given the MACs of one forward pass, padding counted as MFU does.

        Evaluation, checkpoints and interruptions come on top.
        """
        peak, _ = self.device.training_peak
        return training_flops_per_image(macs) * images / (self.count * peak * mfu) / 3600

    def describe(self) -> str:
        """The devices, with the source of their peak."""
        return f"{self.count:,} x {self.device.describe()}"


def cost_row(
    hours: float, device_hours: float | None, device: Device | None, price: float | None
) -> dict[str, float | None]:
    """Hours on the clock, hours of all devices, the most kWh that these draw, and the price; None if not known."""
    watts = None if device is None else device.watts
    return {
        "hours": hours,
        "device_hours": device_hours,
        "energy_kwh": None if device_hours is None or watts is None else device_hours * watts / 1000,
        "cost": None if device_hours is None or price is None else device_hours * price,
    }
