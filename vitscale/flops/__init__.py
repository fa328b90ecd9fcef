"""What training costs: multiply-adds of a model, FLOPs of a run, peaks of the hardware. No torch.

Counts are conventional: every multiply-add of matrix products and convolutions, and nothing else.
"""

from vitscale.flops.accounting import exaflops, mfu, training_flops_per_image
from vitscale.flops.hardware import peak_flops
from vitscale.flops.vit import vit_macs

__all__ = ["exaflops", "mfu", "peak_flops", "training_flops_per_image", "vit_macs"]
