"""Peak matrix throughput of known accelerators, by the name the CUDA driver reports or by the common one.

Figures are dense (datasheets often print twice as much, for 2:4 sparsity), with fp32 accumulation, at boost clock. A
device is listed when its maker publishes the figure and its driver name is unambiguous. Everything else is unknown and
has no utilisation: a wrong peak is worse than none. So driver names are matched whole: "NVIDIA H100 80GB HBM3 MIG
3g.40gb" is a slice of an H100, "NVIDIA A100-SXM-64GB" a custom part with another number of cores, "NVIDIA GeForce RTX
4090 D" and the laptop parts are slower chips under a known name.
"""

import re
from dataclasses import dataclass
from typing import Literal

from vitscale.ground.errors import RecipeError
from vitscale.ground.wording import did_you_mean

Dtype = Literal["bf16", "fp16"]


@dataclass(frozen=True)
class Device:
    """One accelerator."""

    name: str  # the common one, such as `h200`
    driver_name: str  # a regular expression for the whole name that its driver reports
    peak: dict[Dtype, float]  # FLOP/s, if published
    watts: float | None  # the most that it is made to draw, as published for the accelerator alone
    source: str

    @property
    def memory(self) -> float | None:
        """Bytes of memory by the datasheet; None if there are several variants, or we are not sure."""
        return _MEMORY.get(self.name)

    @property
    def training_peak(self) -> tuple[float, Dtype]:
        """FLOP/s and dtype of training: bf16, or fp16 if there is no bf16."""
        dtype: Dtype = "bf16" if "bf16" in self.peak else "fp16"
        return self.peak[dtype], dtype

    def describe(self) -> str:
        """Name, peak, dtype, power and source in one line."""
        peak, dtype = self.training_peak
        power = "power not published" if self.watts is None else f"{self.watts:g} W"
        return f"{self.name}: {peak / 1e12:g} TFLOP/s {dtype}, {power}; {self.source}"


def _same(teraflops: float) -> dict[Dtype, float]:
    """The common case since Ampere: bf16 and fp16 run at one rate."""
    return {"bf16": teraflops * 1e12, "fp16": teraflops * 1e12}


_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"
_A100 = "NVIDIA A100 datasheet"
_GB200 = "NVIDIA GB200 NVL72 datasheet (360 PFLOP/s with sparsity over 72 GPUs)"
_B200 = "NVIDIA HGX B200 datasheet (36 PFLOP/s with sparsity over 8 GPUs)"
_TPUV3 = "Google Cloud TPU v3 documentation, half a chip of two cores (123 TFLOP/s, at most 262 W measured)"

DEVICES = (
    # For superchips with a CPU only the power of the whole is published.
    Device("gb200", r"NVIDIA GB200", _same(2500), None, _GB200),
    Device("b200", r"NVIDIA B200", _same(2250), 1000, _B200),
    Device(
        "gh200", r"NVIDIA GH200 (120GB|480GB|144G HBM3e)", _same(989.4), None, "NVIDIA GH200 datasheet (1,979 sparse)"
    ),
    Device("h200", r"NVIDIA H200", _same(989.4), 700, "NVIDIA H200 datasheet, SXM (1,979 with sparsity)"),
    Device("h200-nvl", r"NVIDIA H200 NVL", _same(835.5), 600, "NVIDIA H200 datasheet, NVL (1,671 with sparsity)"),
    Device("h100", r"NVIDIA H100 80GB HBM3", _same(989.4), 700, f"{_HOPPER}, SXM5"),
    Device("h100-pcie", r"NVIDIA H100 PCIe", _same(756), 350, f"{_HOPPER}, PCIe"),
    Device("h100-nvl", r"NVIDIA H100 NVL", _same(835.5), 400, "NVIDIA H100 datasheet, NVL (1,671 with sparsity)"),
    Device("a100", r"(NVIDIA )?A100-SXM4-(40|80)GB", _same(312), 400, f"{_A100}, SXM"),
    Device("a100-pcie", r"(NVIDIA )?A100(-PCIE-80GB| 80GB PCIe)", _same(312), 300, f"{_A100}, PCIe 80 GB"),
    Device("a100-pcie-40gb", r"(NVIDIA )?A100-PCIE-40GB", _same(312), 250, f"{_A100}, PCIe 40 GB"),
    Device("a30", r"(NVIDIA )?A30", _same(165), 165, "NVIDIA A30 datasheet"),
    Device("a10", r"(NVIDIA )?A10", _same(125), 150, "NVIDIA A10 datasheet"),
    Device("a40", r"(NVIDIA )?A40", _same(149.7), 300, f"{_GA102} and NVIDIA A40 datasheet"),
    Device("a6000", r"(NVIDIA )?RTX A6000", _same(154.8), 300, _GA102),
    Device("l40s", r"NVIDIA L40S", _same(362.05), 350, "NVIDIA L40S datasheet"),
    Device("l40", r"NVIDIA L40", _same(181.05), 300, "NVIDIA L40 datasheet"),
    Device("l4", r"NVIDIA L4", _same(121), 72, "NVIDIA L4 datasheet (242 with sparsity)"),
    Device("rtx5090", r"NVIDIA GeForce RTX 5090", _same(209.5), 575, _BLACKWELL),
    Device("rtx4090", r"NVIDIA GeForce RTX 4090", _same(165.2), 450, _ADA),
    Device("rtx3090", r"(NVIDIA )?GeForce RTX 3090", _same(71), 350, _GA102),
    # Before Ampere there are no bf16 matrix units.
    Device("v100", r"Tesla V100-SXM[23]-(16|32)GB", {"fp16": 125e12}, 300, "NVIDIA V100 datasheet, SXM"),
    Device("v100-pcie", r"Tesla V100-PCIE-(16|32)GB", {"fp16": 112e12}, 250, "NVIDIA V100 datasheet, PCIe"),
    Device("v100s", r"Tesla V100S-PCIE-32GB", {"fp16": 130e12}, 250, "NVIDIA V100 datasheet, V100S"),
    Device("t4", r"(Tesla|NVIDIA) T4", {"fp16": 65e12}, 70, "NVIDIA T4 datasheet"),
    # One core, as the paper counts them; its driver name is JAX's.
    Device("tpuv3", r"TPU v3", {"bf16": 61.5e12}, 131, _TPUV3),
)

_MEMORY = {
    name: gigabytes * 1e9
    for gigabytes, names in {
        141: ("h200", "h200-nvl"),
        94: ("h100-nvl",),
        80: ("h100", "h100-pcie", "a100-pcie"),
        48: ("a40", "a6000", "l40s", "l40"),
        40: ("a100-pcie-40gb",),
        32: ("rtx5090",),
        24: ("a30", "a10", "l4", "rtx4090", "rtx3090"),
    }.items()
    for name in names
}


def peak_flops(device_name: str, dtype: Dtype) -> float | None:
    """Peak dense FLOP/s of matrix products in `dtype`, by `torch.cuda.get_device_name()`; None if not known."""
    found = (device for device in DEVICES if re.fullmatch(device.driver_name, device_name, re.IGNORECASE))
    return next((device.peak.get(dtype) for device in found), None)


def find_device(name: str) -> Device:
    """A device by its common name, in any case. Raises `RecipeError` listing the known ones."""
    by_name = {device.name: device for device in DEVICES}
    if name.lower() in by_name:
        return by_name[name.lower()]
    hint = did_you_mean(name.lower(), by_name)
    known = "\n".join(f"  {device.describe()}" for device in DEVICES)
    raise RecipeError(
        f"unknown device {name!r}{hint and f' ({hint})'}; known, each with its peak for dense products:\n{known}"
    )
