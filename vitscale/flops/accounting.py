"""From multiply-adds of a forward pass to the FLOPs of a run, by one convention; from its hours to energy and money.

The convention reproduces the paper's corrected Table 6: two FLOPs a multiply-add, taps on zero padding not counted, and
a training step costs three forward passes (the backward pass computes gradients of inputs and of weights). MFU counts
the taps on padding, as its usual definition does. Activation recomputation is not model FLOPs and is never counted.
"""

from vitscale.flops.hardware import Device

FLOPS_PER_MAC = 2
FORWARD_PASSES_PER_TRAINING_STEP = 3
PUBLISHED_MFU = 0.4
PUBLISHED_MFU_SOURCE = "as Llama 3's 38 to 43 % in bf16 on 8,192 and 16,384 H100 (Dubey et al. 2024, table 4)"


def training_flops_per_image(macs: int) -> int:
    """FLOPs of training on one image, given the MACs of its forward pass."""
    return FORWARD_PASSES_PER_TRAINING_STEP * FLOPS_PER_MAC * macs


def exaflops(accounting_macs: int, images: float) -> float:
    """exaFLOPs (1e18) of training on `images` images, given the accounting MACs of one forward pass."""
    return training_flops_per_image(accounting_macs) * images / 1e18


def mfu(images_per_s: float, macs: int, num_devices: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation, a fraction: what the model needs over what the devices could do.

    `images_per_s` is that of all devices, `macs` one image's forward pass, padding counted, and `peak` FLOP/s of one
    device (`hardware.peak_flops`). None, an unknown device, has no utilisation: None.
    """
    return None if peak is None else training_flops_per_image(macs) * images_per_s / (num_devices * peak)


def training_hours(macs: int, images: float, peak: float, mfu: float) -> float:
    """Hours of training on `images` images at a utilisation; `macs` as for `mfu`, `peak` FLOP/s of all devices."""
    return training_flops_per_image(macs) * images / (peak * mfu) / 3600


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
