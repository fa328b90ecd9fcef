"""Numbers in sentences: `1 shard`, `2 shards`, `0-3, 7`."""

_SHOWN_SPANS = 10


def counted(number: int, noun: str) -> str:
    """`1 shard`, `2 epochs`, `1,000 classes`: a number and its noun, given in the singular."""
    hisses = noun.endswith(("s", "ch", "sh", "x")) and not noun.endswith("och")
    plural = noun if number == 1 else f"{noun}es" if hisses else f"{noun}s"
    return f"{number:,} {plural}"


def ranges(numbers: list[int]) -> str:
    """`0-3, 7, 9-12`: sorted numbers as spans, of which the first ten are shown."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = ", ".join(f"{a:,}" if a == b else f"{a:,}-{b:,}" for a, b in spans[:_SHOWN_SPANS])
    return shown + (" ..." if len(spans) > _SHOWN_SPANS else "")
