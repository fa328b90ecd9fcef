"""What loaders must not leave behind."""

import threading
from pathlib import Path


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("vitscale-data")]


def open_files():
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def resident_bytes():
    import psutil

    return psutil.Process().memory_info().rss
