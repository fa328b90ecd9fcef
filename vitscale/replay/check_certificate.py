"""Checks a certificate of a run. Python's standard library alone; this file can be read, and run, by itself.

    python check_certificate.py certificate.json [PLACE=FOLDER...]

A certificate lists files of several places: `run` is the run's directory, `train` and others are datasets, `report` is
a report. `run` is the certificate's own folder unless another is given; a place that is not given is not looked at, and
that is stated. Each file has its size and SHA-256, and all of them, with what the certificate says of the run, have
one root of a Merkle tree as in RFC 6962 (leaves: SHA-256 of a zero byte and the leaf; nodes: of a one byte and
both children). Whoever has published the root has published everything.

Exit code 0: all that was looked at is as the certificate says. 1: something is not, and is named. 2: it cannot be read.
It has to list at least the run's recipe, metrics and DONE, a checkpoint, and the manifest of the training data.
"""

import errno
import hashlib
import json
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = 1
_NEEDED = ("run/recipe.yaml", "run/metrics.jsonl", "run/DONE", "train/manifest.json")
_BLOCK = 1 << 22


def leaf(value: object) -> bytes:
    """The hash of one entry: any JSON value, written without spaces and with sorted keys, in ASCII."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"\0" + text.encode("ascii")).digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """The Merkle root of a list of hashes; the left subtree gets the largest power of two smaller than their number."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    left = 1
    while left * 2 < len(leaves):
        left *= 2
    return hashlib.sha256(b"\1" + merkle_root(leaves[:left]) + merkle_root(leaves[left:])).digest()


def root_of(certificate: dict[str, Any]) -> str:
    """The root hash computed from a certificate's content, in hexadecimal."""
    files = sorted(certificate["files"], key=lambda entry: entry["name"])
    leaves = [leaf({"version": certificate["version"], "about": certificate["about"]})]
    leaves += [leaf([entry["name"], entry["bytes"], entry["sha256"]]) for entry in files]
    return merkle_root(leaves).hex()


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal, computed in bounded memory."""
    digest = hashlib.sha256()
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would never end
        raise OSError(errno.EINVAL, "is not a regular file")
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def check(certificate: dict[str, Any], places: dict[str, str]) -> tuple[list[str], list[str]]:
    """Compare files with a certificate; returns one line per difference, and the places that were not looked at.

    Args:
        certificate: the parsed certificate.
        places: place -> its folder on this machine.
    """
    wrong = []
    root = root_of(certificate)
    if root != certificate["root"]:
        wrong.append(f"certificate: its content has the root {root}; it says {certificate['root']}")
    names = {entry["name"] for entry in certificate["files"]}
    wrong += [f"certificate: does not list {name}" for name in _NEEDED if name not in names]
    if not any(name.endswith("/index.json") for name in names) or len(names) < len(certificate["files"]):
        wrong.append("certificate: lists no checkpoint, or a file twice")
    unseen = set()
    for entry in certificate["files"]:
        place, _, inside = entry["name"].partition("/")
        if place not in places:
            unseen.add(place)
            continue
        path = Path(places[place], *inside.split("/"))
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                wrong.append(f"{entry['name']}: {size:,} bytes; expected {entry['bytes']:,}")
            elif sha256_of(path) != entry["sha256"]:
                wrong.append(f"{entry['name']}: its bytes are others")
            elif entry["name"] == "run/DONE" and json.loads(path.read_bytes()) != certificate["about"].get("done"):
                wrong.append("run/DONE: not the result that the certificate claims")
        except (OSError, ValueError) as error:
            wrong.append(f"{entry['name']}: {getattr(error, 'strerror', None) or error}")
    return wrong, sorted(unseen)


def _say(line: str) -> None:
    """Print a line; nothing in it controls a terminal."""
    print("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line))


def _read(path: str) -> dict[str, Any]:
    sha256_of(Path(path))  # raises for what is no regular file
    certificate: dict[str, Any] = json.loads(Path(path).read_text(encoding="ascii"))
    if certificate["version"] != VERSION:
        raise ValueError(f"version {certificate['version']!r}; this program reads {VERSION}")
    for entry in certificate["files"]:
        parts = entry["name"].split("/")
        if len(parts) < 2 or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{entry['name']!r} is not a file's name")
        if not isinstance(entry["bytes"], int) or not isinstance(entry["sha256"], str):
            raise ValueError(f"{entry['name']!r} has no size and digest")
    if not isinstance(certificate["about"], dict) or not isinstance(certificate["root"], str):
        raise ValueError("it has no root, or no entries below it")
    return certificate


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help") or any("=" not in each for each in arguments[1:]):
        print(__doc__)
        return 2
    try:
        certificate = _read(arguments[0])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _say(f"{arguments[0]}: not a certificate: {type(error).__name__}: {error}")
        return 2
    places = {"run": str(Path(arguments[0]).resolve().parent)}
    for given in arguments[1:]:
        place, _, folder = given.partition("=")
        places[place] = folder
    known = {entry["name"].partition("/")[0] for entry in certificate["files"]}
    if unknown := sorted(places.keys() - known - {"run"}):
        _say(f"{', '.join(unknown)}: no such place; the certificate has {', '.join(sorted(known))}")
        return 2
    wrong, unseen = check(certificate, places)
    for line in wrong:
        _say(f"BAD  {line}")
    for place in unseen:
        _say(f"not looked at: {place}; give its folder: {place}=FOLDER")
    files = certificate["files"]
    seen = sum(entry["name"].partition("/")[0] in places for entry in files)
    _say(f"{seen:,} of {len(files):,} files looked at, {len(wrong):,} things wrong; root {certificate['root']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
