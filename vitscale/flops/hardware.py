"""Peak matrix throughput of known accelerators, by the name the CUDA driver reports.

Figures are dense (datasheets often print twice as much, for 2:4 sparsity), with fp32 accumulation, at boost clock. A
device is listed when its maker publishes the figure and its driver name is unambiguous. Everything else is unknown and
has no utilisation: a wrong peak is worse than none. So names are matched whole: "NVIDIA H100 80GB HBM3 MIG 3g.40gb" is
a slice of an H100, "NVIDIA A100-SXM-64GB" a custom part with another number of cores, "NVIDIA GeForce RTX 4090 D" and
the laptop parts are slower chips under a known name.
"""

import re
from dataclasses import dataclass
from typing import Literal

Dtype = Literal["bf16", "fp16"]


@dataclass(frozen=True)
class Device:
    """One accelerator: a regular expression for its whole driver name, FLOP/s by dtype, where they are published."""

    name: str
    peak: dict[Dtype, float]
    source: str


def _same(teraflops: float) -> dict[Dtype, float]:
    """The common case since Ampere: bf16 and fp16 run at one rate."""
    return {"bf16": teraflops * 1e12, "fp16": teraflops * 1e12}


_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A"

DEVICES = (
    Device(r"NVIDIA GB200", _same(2500), "NVIDIA GB200 NVL72 datasheet (360 PFLOP/s with sparsity over 72 GPUs)"),
    Device(r"NVIDIA B200", _same(2250), "NVIDIA HGX B200 datasheet (36 PFLOP/s with sparsity over 8 GPUs)"),
    Device(r"NVIDIA GH200 (120GB|480GB|144G HBM3e)", _same(989.4), "NVIDIA GH200 datasheet (1,979 with sparsity)"),
    Device(r"NVIDIA H200", _same(989.4), "NVIDIA H200 datasheet, SXM (1,979 with sparsity)"),
    Device(r"NVIDIA H200 NVL", _same(835.5), "NVIDIA H200 datasheet, NVL (1,671 with sparsity)"),
    Device(r"NVIDIA H100 80GB HBM3", _same(989.4), f"{_HOPPER}, SXM5"),
    Device(r"NVIDIA H100 PCIe", _same(756), f"{_HOPPER}, PCIe"),
    Device(r"NVIDIA H100 NVL", _same(835.5), "NVIDIA H100 datasheet, NVL (1,671 with sparsity)"),
    Device(r"(NVIDIA )?A100-SXM4-(40|80)GB", _same(312), "NVIDIA A100 datasheet"),
    Device(r"(NVIDIA )?A100(-PCIE-40GB|-PCIE-80GB| 80GB PCIe)", _same(312), "NVIDIA A100 datasheet"),
    Device(r"(NVIDIA )?A30", _same(165), "NVIDIA A30 datasheet"),
    Device(r"(NVIDIA )?A10", _same(125), "NVIDIA A10 datasheet"),
    Device(r"(NVIDIA )?A40", _same(149.7), f"{_GA102} and NVIDIA A40 datasheet"),
    Device(r"(NVIDIA )?RTX A6000", _same(154.8), _GA102),
    Device(r"NVIDIA L40S", _same(362.05), "NVIDIA L40S datasheet"),
    Device(r"NVIDIA L40", _same(181.05), "NVIDIA L40 datasheet"),
    Device(r"NVIDIA L4", _same(121), "NVIDIA L4 datasheet (242 with sparsity)"),
    Device(r"NVIDIA GeForce RTX 5090", _same(209.5), "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"),
    Device(r"NVIDIA GeForce RTX 4090", _same(165.2), _ADA),
    Device(r"(NVIDIA )?GeForce RTX 3090", _same(71), _GA102),
    # Before Ampere there are no bf16 matrix units.
    Device(r"Tesla V100-SXM[23]-(16|32)GB", {"fp16": 125e12}, "NVIDIA V100 datasheet, SXM"),
    Device(r"Tesla V100-PCIE-(16|32)GB", {"fp16": 112e12}, "NVIDIA V100 datasheet, PCIe"),
    Device(r"Tesla V100S-PCIE-32GB", {"fp16": 130e12}, "NVIDIA V100 datasheet, V100S"),
    Device(r"(Tesla|NVIDIA) T4", {"fp16": 65e12}, "NVIDIA T4 datasheet"),
)


def peak_flops(device_name: str, dtype: Dtype) -> float | None:
    """Peak dense FLOP/s of one device for matrix products in `dtype`, or None where it is not known.

    `device_name` is what `torch.cuda.get_device_name()` says.
    """
    for device in DEVICES:
        if re.fullmatch(device.name, device_name, re.IGNORECASE):
            return device.peak.get(dtype)
    return None
