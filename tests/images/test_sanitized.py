"""The C files under gcc's sanitizers, on damaged files: no access outside of memory, nothing undefined, one verdict.

`make sanitize` does the same on more files, `make fuzz` makes some of its own.
"""

import subprocess
from pathlib import Path

import pytest
from damaged_jpegs import damaged_jpegs, small_jpegs

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def test_nothing_is_found(tmp_path, data_root):
    native = REPOSITORY / "vitscale" / "ground" / "native"
    sources = [*sorted(native.glob("*.c")), Path(__file__).parent / "fuzz_images.c"]
    flags = ["-g", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    sanitizers = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
    include = f"-I{native}"
    program = tmp_path / "fuzz_images"
    command = ["gcc", *flags, *sanitizers, include, *map(str, sources), "-ljpeg", "-lm"]
    built = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, check=False)
    if "asan" in built.stderr and "cannot find" in built.stderr:
        pytest.skip("gcc has no sanitizers here")
    assert built.returncode == 0, built.stderr
    paths = [path for path in sorted((data_root / "oddities" / "files").iterdir()) if path.suffix == ".jpg"]
    paths += sorted((Path(__file__).parent / "corpus").iterdir())
    for number, content in enumerate([*small_jpegs().values(), *damaged_jpegs(250), b"", b"\xff", b"\xff\xd8"]):
        paths.append(tmp_path / f"{number}.jpg")
        paths[-1].write_bytes(content)
    done = subprocess.run([str(program), *map(str, paths)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(paths)} files: nothing found\n"
