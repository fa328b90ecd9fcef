"""A small file of FFCV's own writer, and how it may be damaged."""

import struct

import numpy as np
from pictures import make_picture
from stock_beton import write_stock

HEADER_BYTES, FIELD_BYTES = 24, 1041
FIRST_ROW = HEADER_BYTES + 2 * FIELD_BYTES


def pixels_of(seed, height, width):
    return np.asarray(make_picture(seed, height, width))


def write_small(path):
    """9 samples of several sizes: raw, JPEG, raw, ..."""
    from ffcv.fields import IntField, RGBImageField

    rows = [(pixels_of(i, 20 + i, 30 + (i % 2) * 120), i % 4) for i in range(9)]
    # "smart" keeps as raw pixels what is below the threshold.
    fields = {"picture": RGBImageField(write_mode="smart", smart_threshold=5_000), "class": IntField()}
    return write_stock(path, fields, rows)


def table_of(content):
    return struct.unpack_from("<Q", content, 16)[0]


def patch(where, kind, value):
    def apply(content):
        struct.pack_into(kind, content, where if isinstance(where, int) else where(content), value)

    return apply


def first_jpeg(content):
    """Position of the second sample's image, which is a JPEG."""
    return struct.unpack_from("<Q", content, FIRST_ROW + 24 + 5)[0]


def last_piece(content):
    return len(content) - 24


OF_THE_FORMAT = {
    "crashed writer": patch(16, "<Q", 0),
    "other version": patch(0, "<H", 3),
    "no samples": patch(8, "<Q", 0),
    "absurd samples": patch(8, "<Q", 1 << 60),
    "table beyond the end": patch(16, "<Q", 1 << 50),
    "truncated header": lambda content: content.__delitem__(slice(10, None)),
    "truncated fields": lambda content: content.__delitem__(slice(100, None)),
    "truncated table": lambda content: content.__delitem__(slice(len(content) - 24, None)),
    "empty": lambda content: content.clear(),
}
"""Damages of any file of the format, ours as well."""

# A sample has 24 bytes: mode u1, width u2, height u2, position u8 of the picture, and from 16 on the class i8.
DAMAGES = {
    **OF_THE_FORMAT,
    "page size": patch(4, "<I", 1 << 20),
    "more samples": patch(8, "<Q", 10),
    "no fields": patch(2, "<H", 0),
    "more fields than bytes": patch(2, "<H", 60_000),
    "custom field": patch(HEADER_BYTES, "<B", 255),
    "unknown field": patch(HEADER_BYTES, "<B", 7),
    "two fields of one name": patch(HEADER_BYTES + FIELD_BYTES + 1, "16s", b"picture"),
    "table elsewhere": lambda content: patch(16, "<Q", table_of(content) - 1)(content),
    "image mode": patch(FIRST_ROW, "<B", 2),
    "raw as a JPEG": patch(FIRST_ROW, "<B", 0),
    "a JPEG as raw": patch(FIRST_ROW + 24, "<B", 1),
    "no width": patch(FIRST_ROW + 1, "<H", 0),
    "raw of another width": patch(FIRST_ROW + 1, "<H", 31),
    "a JPEG of another width": patch(FIRST_ROW + 24 + 1, "<H", 40),
    "image outside": patch(FIRST_ROW + 5, "<Q", 1 << 60),
    "image of another": lambda content: patch(FIRST_ROW + 5, "<Q", first_jpeg(content))(content),
    "label": patch(FIRST_ROW + 16, "<q", -2),
    "piece outside": lambda content: patch(last_piece(content) + 8, "<Q", 1 << 63)(content),
    "piece without end": lambda content: patch(last_piece(content) + 16, "<Q", 1 << 63)(content),
    "piece too long": lambda content: patch(table_of(content) + 16, "<Q", 50_000)(content),
    "piece too short": lambda content: patch(table_of(content) + 16, "<Q", 17)(content),
    "truncated pages": lambda content: content.__delitem__(slice((2 << 20) + 100, None)),
}
