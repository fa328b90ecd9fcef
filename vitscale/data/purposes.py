"""The purposes of hashes: draws for different ones are independent. A number that was used once means that for ever."""

from enum import IntEnum


class Purpose(IntEnum):
    """What is drawn. From 1,000 on the numbers belong to objectives of other packages."""

    SHARDS = 1  # their order in an epoch
    WINDOW = 2  # the order of the samples in a window
    CROP = 3  # its area and aspect; with the epoch, also the key of a sample
    FLIP = 4
    CHECK = 5  # which samples' checksums are looked at
    TOP = 6
    LEFT = 7
    PATCH_ORDER = 8  # which patches are masked, and how
    OPERATION = 9  # the keys of an operation on images
    MIXED_BATCH = 20
    MIXED = 21
    CUT = 22
    RADIUS = 23
    ANGLE = 24
    ROW = 25
    COLUMN = 26
    VIEW = 27
    KEPT = 28  # which patches are kept
