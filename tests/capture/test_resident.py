"""Large captures stay mapped, and their pages are released after reading."""

import time
from pathlib import Path

import numpy as np

from kdissect.capture import resident
from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SEGMENT


def resident_bytes(address: int) -> int:
    """Rss of the mapping at `address`, from the kernel's own account."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    rss = next(line for line in lines[start:] if line.startswith("Rss:"))
    return int(rss.split()[1]) * 1024


def test_pages_are_let_go_and_come_back(tmp_path: Path) -> None:
    """After a moment nothing of the file is resident; its bytes read the same as before."""
    path = tmp_path / "large.bin"
    size = resident.WATCHED_SIZE_MIN + 4096
    with path.open("wb") as stream:
        stream.truncate(size)
        stream.seek(size // 2)
        stream.write(b"in the middle")
    data = Sources([path]).data(0)
    address = data.ctypes.data
    before = int(data.sum(dtype=np.int64))
    deadline = time.monotonic() + 60
    while resident_bytes(address) > size // 8 and time.monotonic() < deadline:
        time.sleep(resident.INTERVAL_S)
    assert resident_bytes(address) <= size // 8
    assert int(data.sum(dtype=np.int64)) == before
    del data


def test_mappings_end_with_their_arrays(tmp_path: Path) -> None:
    """Nothing is watched once the last array of a file is gone."""
    path = tmp_path / "large.bin"
    with path.open("wb") as stream:
        stream.truncate(resident.WATCHED_SIZE_MIN)
    sources = Sources([path])
    address = sources.data(0).ctypes.data
    assert address in resident._watched
    del sources
    assert address not in resident._watched


def test_staging_segments_leaves_nothing_of_the_file_resident(tmp_path: Path) -> None:
    """Segments across a large file are copied, and its pages are released."""
    path = tmp_path / "large"
    path.write_bytes(bytes(resident.WATCHED_SIZE_MIN))
    sources = Sources([path])
    segments = np.zeros(4096, SEGMENT)
    segments["pos"] = np.arange(4096) * (resident.WATCHED_SIZE_MIN // 4096)
    segments["captured"] = 100
    resident._watched.clear()  # by itself, not by the thread
    staged = sources.staged(segments)
    assert resident_bytes(sources.data(0).ctypes.data) <= 1 << 20
    zeros = np.zeros(4096, np.int32)
    staged.addresses(zeros, segments["pos"], segments["captured"])
    assert resident_bytes(sources.data(0).ctypes.data) <= 1 << 20
