"""A small file of FFCV's own writer, and how it may be damaged."""

import struct

import numpy as np
from pictures import make_picture
from stock_beton import write_stock

HEADER_BYTES, FIELD_BYTES = 24, 1041


def pixels_of(seed, height, width):
    return np.asarray(make_picture(seed, height, width))


def write_small(path):
    """9 samples of several sizes: raw, JPEG, raw, ..."""
    from ffcv.fields import IntField, RGBImageField

    rows = [(pixels_of(i, 20 + i, 30 + (i % 2) * 120), i % 4) for i in range(9)]
    # "smart" keeps as raw pixels what is below the threshold.
    fields = {"picture": RGBImageField(write_mode="smart", smart_threshold=5_000), "class": IntField()}
    return write_stock(path, fields, rows)


def first_row(content):
    return HEADER_BYTES + 2 * FIELD_BYTES


def table_of(content):
    return struct.unpack_from("<Q", content, 16)[0]


def patch(where, kind, value):
    def apply(content):
        struct.pack_into(kind, content, where if isinstance(where, int) else where(content), value)

    return apply


def first_jpeg(content):
    """Position of the second sample's image, which is a JPEG."""
    return struct.unpack_from("<Q", content, first_row(content) + 24 + 5)[0]


def last_piece(content):
    return len(content) - 24


# A sample has 24 bytes: mode u1, width u2, height u2, position u8 of the picture, and from 16 on the class i8.
DAMAGES = {
    "crashed writer": (patch(16, "<Q", 0), "did not finish"),
    "other version": (patch(0, "<H", 3), "format version 3"),
    "page size": (patch(4, "<I", 1 << 20), "page size"),
    "no samples": (patch(8, "<Q", 0), "no samples"),
    "more samples": (patch(8, "<Q", 10), "at least 10 times 24 bytes"),
    "absurd samples": (patch(8, "<Q", 1 << 60), "samples and an allocation table"),
    "no fields": (patch(2, "<H", 0), "no field of kind image"),
    "more fields than bytes": (patch(2, "<H", 60_000), "a field table of"),
    "custom field": (patch(HEADER_BYTES, "<B", 255), "'picture' is of a type that is not FFCV's own"),
    "unknown field": (patch(HEADER_BYTES, "<B", 7), "'picture' is of a type that is not FFCV's own"),
    "two fields of one name": (patch(HEADER_BYTES + FIELD_BYTES + 1, "16s", b"picture"), "fields of one name"),
    "table beyond the end": (patch(16, "<Q", 1 << 50), "allocation table at byte"),
    "table elsewhere": (lambda content: patch(16, "<Q", table_of(content) - 1)(content), "an allocation table of"),
    "image mode": (patch(first_row, "<B", 2), "neither a JPEG nor raw"),
    "raw as a JPEG": (patch(first_row, "<B", 0), r"no JPEG of the height and width that the file states: sample 0,"),
    "a JPEG as raw": (lambda content: patch(first_row(content) + 24, "<B", 1)(content), "raw pixels that are not"),
    "no width": (lambda content: patch(first_row(content) + 1, "<H", 0)(content), "without height or width"),
    "raw of another width": (lambda content: patch(first_row(content) + 1, "<H", 31)(content), "raw pixels that are"),
    "a JPEG of another width": (
        lambda content: patch(first_row(content) + 24 + 1, "<H", 40)(content),
        "the image of 1 of 9 samples is no JPEG of the height and width that the file states: sample 1, counted",
    ),
    "image outside": (lambda content: patch(first_row(content) + 5, "<Q", 1 << 60)(content), "nothing was allocated"),
    "image of another": (
        lambda content: patch(first_row(content) + 5, "<Q", first_jpeg(content))(content),
        "nothing was allocated for",
    ),
    "label": (
        lambda content: patch(first_row(content) + 16, "<q", -2)(content),
        "sample 0 has -2 in the field 'class'",
    ),
    "piece outside": (lambda content: patch(last_piece(content) + 8, "<Q", 1 << 63)(content), "outside the pages"),
    "piece without end": (lambda content: patch(last_piece(content) + 16, "<Q", 1 << 63)(content), "outside the pages"),
    "piece too long": (lambda content: patch(table_of(content) + 16, "<Q", 50_000)(content), "overlapping pieces"),
    "piece too short": (lambda content: patch(table_of(content) + 16, "<Q", 17)(content), "raw pixels that are not"),
    "truncated header": (lambda content: content.__delitem__(slice(10, None)), "header of 24 bytes"),
    "truncated fields": (lambda content: content.__delitem__(slice(100, None)), "field table"),
    "truncated pages": (lambda content: content.__delitem__(slice((2 << 20) + 100, None)), "inside the file"),
    "truncated table": (lambda content: content.__delitem__(slice(len(content) - 24, None)), "allocation table of"),
    "empty": (lambda content: content.clear(), "0 bytes"),
}
