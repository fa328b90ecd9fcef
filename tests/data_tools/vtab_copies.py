"""Small copies of the datasets of VTAB-1k in every layout, made up: image i of a split differs from all others."""

from itertools import chain
from pathlib import Path

import numpy as np
from pictures import encoded
from PIL import Image
from small_files import write_files, write_tar
from test_tfrecord import encode, framed

from data_tools.vtab.tasks import ORIGINS
from vitscale.ground.vtab import TASKS

IMAGES = 40  # of a split
ORIENTATION_BINS = [b for b in range(16) for _ in range(3 if b % 2 == 0 else 2)]
CLEVR_DISTANCES = (7.0, 8.2, 8.7, 9.2, 9.7, 11.0)
KITTI_DISTANCES = (5.0, 15.0, 30.0)


def expected_label(task: str, number: int) -> int:
    """What the label of image `number` of a split is, by how the copies are made."""
    return {
        **{"clevr_count": number % 8, "clevr_dist": number % 6, "kitti_dist": number % 4, "dspr_loc": number % 32 // 2},
        "dspr_ori": ORIENTATION_BINS[number % 40],
    }.get(task, number % TASKS[task].num_classes)


def picture(split: str, number: int, *, gray: bool = False, binary: bool = False) -> bytes:
    rng = np.random.default_rng([number, len(split), ord(split[0])])
    pixels = rng.integers(0, 2 if binary else 256, (8, 8) if gray or binary else (8, 8, 3), np.uint8)
    return encoded(Image.fromarray(pixels), "PNG")


def features(task: str, split: str, number: int) -> dict[str, list]:
    """What TFDS has of an image, names as `encode` takes them."""
    image = {"image": [picture(split, number, gray="snorb" in task, binary="dspr" in task)]}
    match ORIGINS[task].tfds_name:
        case "clevr":
            count, nearest = 3 + number % 8, CLEVR_DISTANCES[number % 6]
            coords = [value for i in reversed(range(count)) for value in (1.0 * i, 2.0 * i, nearest + i)]
            return image | {"objects__size": [0] * count, "objects__pixel_coords": coords}
        case "kitti":
            z = (*KITTI_DISTANCES, 2.0)[number % 4]
            types = [5, 0 if number % 4 < 3 else 4]  # a cyclist, nearer than all; a car, or a person sitting
            return image | {"objects__type": types, "objects__location": [0.5, 1.5, 1.0, -3.0, 1.5, z]}
        case "dsprites":
            return image | {"label_x_position": [number % 32], "label_orientation": [number % 40], "label_shape": [0]}
        case "smallnorb":
            labels = {"label_azimuth": [number % 18], "label_elevation": [number % 9], "label_category": [0]}
            return image | {"image2": [picture(split + "2", number, gray=True)]} | labels
    return image | {"label": [number % TASKS[task].num_classes], "file_name": [f"{number}.png"]}


def make_tfds(root: Path, task: str, images: int | dict[str, int] = IMAGES, version: str | None = None) -> Path:
    """Records of a task's dataset, each split in two files; the folder of its version. `images`: of each split."""
    origin = ORIGINS[task]
    version = version or {1: "{}.0.1", 3: "{}"}[len(origin.version.split("."))].format(origin.version)
    folder = root / origin.tfds / version
    if folder.is_dir():
        return folder
    folder.mkdir(parents=True)
    for split in origin.splits:
        count = images if isinstance(images, int) else images[split]
        records = [encode(**features(task, split, number)) for number in range(count)]
        for index, half in enumerate((records[: count // 3], records[count // 3 :])):
            (folder / f"{origin.tfds_name}-{split}.tfrecord-0000{index}-of-00002").write_bytes(framed(*half))
    if origin.rule.features == ("label",) and task != "dmlab":
        names = [f"{task} {number}" for number in range(TASKS[task].num_classes)]
        (folder / "label.labels.txt").write_text("\n".join(names) + "\n")
    return folder


def make_tars(root: Path, task: str, splits: tuple[str, ...], images: int = IMAGES) -> Path:
    """Tars as CLIP_benchmark writes them, two a split."""
    folder = root / f"wds_vtab-{ORIGINS[task].tars or task}"
    for split in splits:
        for index, half in enumerate((range(images // 2), range(images // 2, images))):
            pngs = ((f"s{number:07d}.png", picture(split, number)) for number in half)
            labels = ((f"s{number:07d}.cls", b"%d" % expected_label(task, number)) for number in half)
            write_tar(folder / split / f"{index}.tar", *chain.from_iterable(zip(pngs, labels, strict=True)))
        (folder / split / "nshards.txt").write_text("2\n")
    names = [f"class {number}" for number in range(TASKS[task].num_classes)]
    (folder / "classnames.txt").write_text("\n".join(names) + "\n")
    return folder


def make_folders(root: Path, task: str, **images: int) -> Path:
    """Folders of classes, with so many images of each split; the key of an image begins with its class."""
    for split, count in images.items():
        names = (f"class {expected_label(task, number):03d}/{number:04d}.png" for number in range(count))
        write_files(root / task / split, *((name, picture(split, number)) for number, name in enumerate(names)))
    return root / task
