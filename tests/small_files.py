"""Small files for tests, told in a line: folders, tars, copies in memory, bits that turn, manifests that are edited."""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import xxhash

from vitscale.data.shards import ExcludedSlots, SelectExclude, ShardEntry, ShardFile

File = str | tuple[str, bytes]
"""A name, whose content is the name; or a name and a content."""


def write_files(root: Path, *files: File) -> Path:
    """Write files below `root`, which is returned."""
    for file in files:
        name, content = file if isinstance(file, tuple) else (file, os.fsencode(file))
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path there."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tar_bytes(*members: File | tuple[str, bytes, str], mode: str = "w") -> bytes:
    """A tar of files, and of links or other members as (name, type, target)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for member in members:
            name, content, *target = member if isinstance(member, tuple) else (member, os.fsencode(member))
            info = tarfile.TarInfo(name)
            if target:
                info.type, info.linkname, content = content, target[0], b""
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def write_tar(path: Path, *members: File | tuple[str, bytes, str], mode: str = "w") -> Path:
    """Write `tar_bytes` to `path`, which is returned."""
    write_files(path.parent, (path.name, tar_bytes(*members, mode=mode)))
    return path


def pack(folder: Path, path: Path) -> Path:
    """A tar of a folder, compressed as the suffix of `path` says; `path`."""
    kind = path.suffix.removeprefix(".")
    with tarfile.open(path, "w" if kind == "tar" else f"w:{kind}") as archive:
        archive.add(folder, folder.name)
    return path


def upload(path: Path, url: str) -> str:
    """Put a file or a folder in the place of what is at a URL in memory, which is returned."""
    memory = fsspec.filesystem("memory")
    if memory.exists(url):
        memory.rm(url, recursive=True)
    memory.put(str(path), url, recursive=path.is_dir())
    return url


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Turn a bit of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def flip_images(path: Path, *slots: int) -> None:
    """Turn a bit in the middle of images of a shard."""
    with ShardFile(path) as shard:
        places = [int(shard.offset[slot] + shard.size[slot] // 2) for slot in slots]
    for place in places:
        flip(path, place)


def excluding(folder: Path, name: str, slots: list[int], dtype: type = np.uint32) -> SelectExclude:
    """What selects all slots of a shard but these, whose list is written beside the manifest in `folder`."""
    np.save(folder / name, np.array(slots, dtype))
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return SelectExclude(exclude=ExcludedSlots(path=name, sha256=digest, count=len(slots)))


def edit_manifest(folder: Path, change: Callable[[dict], object]) -> None:
    """Change a manifest as a person does, who removes its checksum."""
    data = json.loads((folder / "manifest.json").read_text())
    data.pop("checksum", None)
    change(data)
    (folder / "manifest.json").write_text(json.dumps(data))


def entry_of(content: bytes) -> ShardEntry:
    """What a manifest says of a shard of these bytes, whatever they are."""
    digests = {"sha256": hashlib.sha256(content).hexdigest(), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    return ShardEntry(path="x.beton", samples=1, bytes=len(content), first_uid=0, **digests)
