"""Feeds damaged files of every format to their readers: each is read, or refused with one of our errors.

    python tests/hostile/mutate.py --seed 0 --minutes 10 --out found

Memory is limited, and each file has some seconds. What fails lies in the folder, with a traceback; a file that ends the
process or hangs is there as `current-*`.
"""

import argparse
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

MEMORY, SECONDS = 500 << 20, 20
NASTY = [b"9" * 30, b"-1", b"1e999", b"NaN", b"[" * 3000, b"{}", b"null", b'""', b"\0", b"\xff" * 8, b"\n", b"\t"]
NASTY += [b"*a", b"&a ", b"!!int ", b"../../x", b"x" * 5000, rb"\ud800", b": ", b"os.path.join", b"true"]


def limit(memory: int = MEMORY, seconds: int = 0) -> None:
    """Leave this process so many bytes more than it has, and perhaps so many seconds."""
    now = int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
    signal.alarm(seconds)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The content with one or a few kinds of damage."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, size = rng.randrange(len(found) + 1), rng.choice((1, 4, 8, 64))
        other = rng.randrange(len(found) + 1)
        numbers = [match.span() for match in re.finditer(rb"\d+", bytes(found))]
        match rng.randrange(7):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                del found[at : len(found) if rng.random() < 0.3 else at + size]
            case 2:
                found[at:at] = found[other : other + size * 4] * rng.choice((1, 1, 50))
            case 3 if numbers:
                found[slice(*rng.choice(numbers))] = rng.choice((b"0", b"-1", b"4294967296", b"9" * 19, b"1e300", b"7"))
            case 4:
                found[at : at + size] = rng.randbytes(size)
            case 5:
                found[at : at + rng.choice((0, 1, 8))] = rng.choice(NASTY)
            case 6:
                found[at : at + 4] = rng.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**16)).to_bytes(4, "little")
    return bytes(found)


def attack(names: list[str], seed: int, count: int, until: float, out: Path) -> int:
    """The number of files read; damages the formats in turn, `count` times each or until a time."""
    from hostile.formats import FORMATS

    from vitscale.ground.errors import VitscaleError

    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp())
    targets = {}
    for number, name in enumerate(names or FORMATS):
        place = folder / f"{number}"
        place.mkdir()
        targets[name] = FORMATS[name].make(place)
        FORMATS[name].read(targets[name])  # the real file is good
    originals = {name: path.read_bytes() for name, path in targets.items()}
    limit()
    read = 0
    for turn in range(count):
        if time.monotonic() > until:
            break
        for name, path in targets.items():
            content = mutated(originals[name], random.Random(f"{seed} {turn} {name}"))
            current = out / f"current-{name}-{path.name}"
            current.write_bytes(content)
            path.write_bytes(content)
            signal.alarm(SECONDS)  # ends the process: nothing else interrupts C
            try:
                FORMATS[name].seal(path)
                FORMATS[name].read(path)
            except VitscaleError as error:
                str(error)
            except Exception:
                shutil.copy(current, out / f"{name}-{seed}-{turn}-{path.name}")
                (out / f"{name}-{seed}-{turn}.txt").write_text(traceback.format_exc())
            signal.alarm(0)
            current.unlink()
            path.write_bytes(originals[name])
            read += 1
    shutil.rmtree(folder)
    return read


def main() -> None:
    """Read the command line, and damage until time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=sys.maxsize, help="files of each format")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("formats", nargs="*", help="default: all")
    options = parser.parse_args()
    tests = Path(__file__).parents[1]
    sys.path += [str(tests.parent), str(tests)]
    until = time.monotonic() + options.minutes * 60
    read = attack(options.formats, options.seed, options.count, until, options.out)
    found = sorted(path.name for path in options.out.iterdir())
    print(f"{read:,} files read, {len(found)} found", *found, sep="\n  ")
    sys.exit(bool(found))


if __name__ == "__main__":
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # others reserve gigabytes of addresses
    main()
