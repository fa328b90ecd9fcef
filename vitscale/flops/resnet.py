"""Operations of the ResNets (BiT), as baselines and as stems of hybrids."""

from vitscale.architectures import AXIAL_RESNET_HEADS, ResNetShape
from vitscale.operations import Operation, block_of, convolution, dense, parameters, product


def resnet_operations(shape: ResNetShape, *, image_size: int, num_classes: int | None) -> list[Operation]:
    """The operations on one image, in order."""
    operations = feature_operations(shape, image_size)
    if shape.variant == "v2":
        operations.append(parameters("norms", 2 * shape.channels))
    if num_classes is not None:
        operations.append(dense("head", 1, shape.channels, num_classes))
    return operations


def feature_operations(shape: ResNetShape, image_size: int) -> list[Operation]:
    """From the image to the last feature map: `root` and `stage1` to `stage4`, their norms included."""
    channels, size = shape.root_channels, -(-image_size // 4)
    operations = [convolution("root", image_size, 3, channels, 7, stride=2, input_gradient=False)]
    if shape.variant == "v1":
        operations.append(parameters("root", 2 * channels))
    units = 0
    for stage, length in enumerate(shape.blocks):
        outputs = shape.stage_channels(stage)
        for index in range(length):
            stride = 2 if stage > 0 and index == 0 else 1
            unit = _unit(shape, f"stage{stage + 1}", channels, outputs, size, stride)
            # v1 ends with a norm, which needs its input to go back; v2 with a sum, which does not.
            operations += block_of(unit, units, needs_output=shape.variant == "v1")
            units += 1
            channels, size = outputs, -(-size // stride)
    return operations


def _unit(shape: ResNetShape, part: str, inputs: int, outputs: int, size: int, stride: int) -> list[Operation]:
    """One bottleneck unit: the shortcut, where it is a convolution, and the three of the residual."""
    middle, out_size = outputs // 4, -(-size // stride)
    normed = inputs + 2 * middle if shape.variant == "v2" else 2 * middle + outputs
    operations = []
    if inputs != outputs or stride > 1:
        operations.append(convolution(part, size, inputs, outputs, 1, stride))
        normed += outputs if shape.variant == "v1" else 0
    operations.append(convolution(part, size, inputs, middle, 1))
    if shape.mixing == "axial":
        operations += 2 * _line_attention(part, middle, size)
    else:
        operations.append(convolution(part, size, middle, middle, 3, stride))
    operations.append(convolution(part, out_size, middle, outputs, 1))
    operations.append(parameters(part, 2 * normed))
    return operations


def _line_attention(part: str, channels: int, n: int) -> list[Operation]:
    """Attention within all rows, or all columns, of n x n positions; queries and keys are half as wide as values."""
    head_dim = channels // AXIAL_RESNET_HEADS
    narrow, wide, offsets = AXIAL_RESNET_HEADS * (head_dim // 2), AXIAL_RESNET_HEADS * head_dim, 2 * n - 1
    return [
        dense(part, n**2, channels, 2 * channels, bias=False),
        product(part, n**3 * (narrow + wide)),
        product(part, n**3 * (2 * narrow + wide), params=offsets * 2 * head_dim),
    ]
