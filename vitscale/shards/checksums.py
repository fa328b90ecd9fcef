"""CRC-32C (Castagnoli), the checksum of every stored image, which the loader checks per sample.

It is a compiled function so that the loader's kernel can call it without leaving compiled code, and uses the
instruction that x86 has for it.
"""

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed


def _slicing_tables() -> np.ndarray:
    """(8, 256) uint32: row k advances the CRC of one byte by k further zero bytes."""
    tables = np.zeros((8, 256), np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        tables[0, byte] = crc
    for row in range(1, 8):
        previous = tables[row - 1]
        tables[row] = (previous >> np.uint32(8)) ^ tables[0][previous & np.uint32(0xFF)]
    return tables


_TABLES = _slicing_tables()
_HAS_INSTRUCTION = bool(llvm.get_host_cpu_features().get("sse4.2"))


@intrinsic
def _instruction(typing_context, crc, word):
    """x86's CRC32 of 8 more bytes; both uint64."""

    def generate(context, builder, signature, arguments):
        word_type = ir.IntType(64)
        function_type = ir.FunctionType(word_type, [word_type, word_type])
        name = "llvm.x86.sse42.crc32.64.64"
        return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)

    return types.uint64(types.uint64, types.uint64), generate


@njit(nogil=True, cache=True)
def _by_tables(crc, word):
    """The same by slicing-by-8."""
    mask = np.uint64(0xFF)
    word ^= crc
    return (
        np.uint64(_TABLES[7, word & mask])
        ^ np.uint64(_TABLES[6, (word >> np.uint64(8)) & mask])
        ^ np.uint64(_TABLES[5, (word >> np.uint64(16)) & mask])
        ^ np.uint64(_TABLES[4, (word >> np.uint64(24)) & mask])
        ^ np.uint64(_TABLES[3, (word >> np.uint64(32)) & mask])
        ^ np.uint64(_TABLES[2, (word >> np.uint64(40)) & mask])
        ^ np.uint64(_TABLES[1, (word >> np.uint64(48)) & mask])
        ^ np.uint64(_TABLES[0, word >> np.uint64(56)])
    )


_next_word = _instruction if _HAS_INSTRUCTION else _by_tables


@njit(nogil=True, cache=True)
def crc32c(data, start, size):
    """CRC-32C of `data[start : start + size]`, a uint8 array; callable from compiled code. Returns uint32.

    Nothing is checked here: the caller vouches for the range.
    """
    # Unsigned throughout: numba turns mixed signed and unsigned 64-bit arithmetic into floating point, and unsigned
    # indices need no wrap-around test.
    mask = np.uint64(0xFF)
    eight = np.uint64(8)
    one = np.uint64(1)
    i = np.uint64(start)
    end = i + np.uint64(size)
    crc = np.uint64(0xFFFFFFFF)
    while i + eight <= end:
        word = np.uint64(0)
        for k in range(8):
            word |= np.uint64(data[i + np.uint64(k)]) << np.uint64(8 * k)
        crc = _next_word(crc, word)  # type: ignore[call-arg]
        i += eight
    while i < end:
        crc = np.uint64(_TABLES[0, (crc ^ np.uint64(data[i])) & mask]) ^ (crc >> eight)
        i += one
    return np.uint32(crc ^ np.uint64(0xFFFFFFFF))


def crc32c_of(data: bytes | bytearray | memoryview | np.ndarray) -> int:
    """CRC-32C of a whole buffer of bytes, in [0, 2**32)."""
    view = np.frombuffer(data, np.uint8)
    return int(crc32c(view, 0, view.size))
