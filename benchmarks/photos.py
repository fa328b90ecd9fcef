"""The real photos that benchmarks of conversion share. Light: worker processes import it again."""

import argparse
import os
import tarfile
from pathlib import Path

COLLECTIONS = ("grocery", "clothing")


def photos_parser(description: str | None) -> argparse.ArgumentParser:
    """A command line that names the folder of real data."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("VITSCALE_TEST_DATA", beside)))
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What it was called with; ends the program where there are no photos."""
    options = parser.parse_args()
    missing = [path for name in COLLECTIONS if not (path := options.data / name / "train.tar").is_file()]
    if missing:
        parser.error(f"{missing[0]}: no such file; name the folder of real data with --data or VITSCALE_TEST_DATA")
    return options


def extract(data: Path, folder: Path) -> list[Path]:
    """The photos of both collections as files."""
    paths: list[Path] = []
    for collection in COLLECTIONS:
        with tarfile.open(data / collection / "train.tar") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name.endswith(".jpg") else None
                if content is not None:
                    paths.append(folder / f"{len(paths):05d}.jpg")
                    paths[-1].write_bytes(content.read())
    return paths
