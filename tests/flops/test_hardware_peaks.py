"""Peaks by driver name: the right part of a family, and nothing for what is not known."""

import pytest

from vitscale.flops.hardware import DEVICES, peak_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71),
    ],
)
def test_bf16_peaks(name, teraflops):
    assert peak_flops(name, "bf16") == teraflops * 1e12
    assert peak_flops(name, "fp16") == teraflops * 1e12


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-32GB", "Tesla T4"])
def test_no_bf16_before_ampere(name):
    assert peak_flops(name, "bf16") is None
    assert peak_flops(name, "fp16") is not None


@pytest.mark.parametrize(
    "name",
    [
        *("cpu", "", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA H20", "NVIDIA A100-SXM-64GB", "NVIDIA A10G"),
        *("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti"),
        "AMD Instinct MI300X",
    ],
)
def test_an_unknown_device_has_no_peak(name):
    assert peak_flops(name, "bf16") is None


def test_every_peak_has_a_source():
    assert all(device.source and device.peak for device in DEVICES)
