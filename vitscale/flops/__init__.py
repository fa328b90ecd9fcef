"""What training costs: multiply-adds of a model, FLOPs of a run, peaks of the hardware. No torch.

Every model has two figures. Conventional MACs count the taps of convolutions that fall on zero padding, as torch,
fvcore and timm do: GMACs per image and MFU. Accounting MACs leave them out, as the paper's exaFLOPs do. Without
convolutions the two are one.

What the paper reports is in `published`; `command` is `vitscale-flops`, and the modules that it alone needs are not
imported here.
"""

from vitscale.flops.accounting import exaflops, mfu, training_flops_per_image
from vitscale.flops.hardware import peak_flops
from vitscale.flops.work import Work, model_work, recipe_work
from vitscale.ground.operations import Operation
