"""Peaks by driver name: the right part of a family, and nothing for what is not known."""

import pytest

from vitscale.flops.hardware import DEVICES, peak_flops

PEAKS = {
    989.4: ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"],
    **{756: ["NVIDIA H100 PCIe"], 835.5: ["NVIDIA H100 NVL"], 2250: ["NVIDIA B200"], 2500: ["NVIDIA GB200"]},
    312: ["NVIDIA A100-SXM4-40GB", "A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB"],
    **{125: ["NVIDIA A10"], 362.05: ["NVIDIA L40S"], 181.05: ["NVIDIA L40"], 121: ["NVIDIA L4"]},
    **{165.2: ["NVIDIA GeForce RTX 4090"], 71: ["NVIDIA GeForce RTX 3090"]},
}


@pytest.mark.parametrize(("name", "teraflops"), [(name, peak) for peak, names in PEAKS.items() for name in names])
def test_bf16_peaks(name, teraflops):
    assert peak_flops(name, "bf16") == peak_flops(name, "fp16") == teraflops * 1e12


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-32GB", "Tesla T4"])
def test_no_bf16_before_ampere(name):
    assert peak_flops(name, "bf16") is None and peak_flops(name, "fp16") is not None


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
