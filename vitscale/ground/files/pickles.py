"""Weighs pickles before anything loads them: a few bytes can ask for all memory, or for a hash that never ends."""

import io
import pickletools
from dataclasses import dataclass
from typing import Any

_MOST_SHARED = 1 << 24
_MOST_DEPTH = 100
_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_PUTS, _GETS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"GET", "BINGET", "LONG_BINGET", "DUP"}
_FILLS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}


@dataclass(slots=True)
class _Value:
    """A value's characters and parts, with all that it shares written out, and its depth."""

    weight: int
    depth: int
    is_shared: bool = False


def check_pickle(data: bytes) -> tuple[int, set[str]]:
    """The length in bytes of the pickle at the beginning of `data`, and the names that it asks for, `module name`.

    Raises ValueError, KeyError or IndexError for damage, and for values that are shared, nested or numbered as no
    writer does, so that they would be far more than the file.
    """
    file = io.BytesIO(data)
    stack: list[_Value] = []
    marks: list[int] = []
    memo: dict[int, _Value] = {}
    names: set[str] = set()
    shared = steps = 0
    name = ""
    while name != "STOP":
        steps += 1
        opcode = _OPCODES[file.read(1)]
        name, before = opcode.name, [each.name for each in opcode.stack_before]
        # pickletools reads no text of Python 2 that has other bytes than ASCII.
        argument: Any = opcode.arg and (file.readline() if name == "STRING" else opcode.arg.reader(file))
        base = marks[-1] if marks else 0
        operands: list[_Value] = []
        if name == "MARK":
            marks.append(len(stack))
            continue
        if name == "POP" and marks and base == len(stack):
            marks.pop()
            continue
        if "mark" in before:
            operands = stack[marks.pop() :]
            del stack[base:]
            base = marks[-1] if marks else 0
        count = before.index("mark") if "mark" in before else int(name in _PUTS | {"DUP"}) or len(before)
        if len(stack) - count < base:
            raise ValueError("a value is missing")
        if name in _PUTS:
            place = len(memo) if name == "MEMOIZE" else argument
            if not 0 <= place <= steps:  # C reserves memory for all places below
                raise ValueError(f"a value is numbered {place:,}, far beyond the others")
            memo[place] = stack[-1]
        elif name in _GETS:
            value = stack[-1] if name == "DUP" else memo[argument]
            value.is_shared = True
            shared += value.weight
            stack.append(value)
        else:
            operands = stack[len(stack) - count :] + operands
            del stack[len(stack) - count :]
            value = operands.pop(0) if name in _FILLS else _Value(1, 0)
            if value.is_shared:
                raise ValueError("a value is changed after others share it")
            value.weight += sum(each.weight for each in operands)
            value.weight += len(argument) if isinstance(argument, str | bytes | bytearray) else 0
            value.depth = max([value.depth, *(1 + each.depth for each in operands)])
            if opcode.stack_after:
                stack.append(value)
        if shared > _MOST_SHARED or (stack and stack[-1].depth > _MOST_DEPTH):
            raise ValueError("its values are nested too deeply, or written out far larger than the file")
        if name in ("GLOBAL", "INST"):
            names.add(argument)
    return file.tell(), names
