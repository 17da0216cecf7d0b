"""Kernels never read outside of their buffer, nor write outside of the builders."""

import ctypes
import mmap
import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kdissect.codec.compression import CODEC_NAMES
from kdissect.codec.message_columns import decode_columns
from kdissect.codec.record_batches import iter_record_chunks
from kdissect.codec.record_encoder import encode_batch, encode_messages
from kdissect.jit import JIT_ENABLED
from kdissect.protocol.column_plan import plan
from tests.codec.vectors import batch, message_vectors
from tests.processes import run

PAGE = mmap.PAGESIZE
ROOM = 4 * PAGE
PROT_NONE, PROT_READ_WRITE = 0, 3

linux = pytest.mark.skipif(sys.platform != "linux", reason="guard pages are set with mprotect")


@pytest.fixture
def guarded() -> Iterator[NDArray[np.uint8]]:
    """Bytes between two pages that no one may touch: a read outside ends the process."""
    pages = mmap.mmap(-1, ROOM + 2 * PAGE)
    array = np.frombuffer(pages, np.uint8)
    address = array.ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    guards = [ctypes.c_void_p(address), ctypes.c_void_p(address + PAGE + ROOM)]
    for guard in guards:
        assert libc.mprotect(guard, PAGE, PROT_NONE) == 0
    yield array[PAGE : PAGE + ROOM]
    for guard in guards:
        assert libc.mprotect(guard, PAGE, PROT_READ_WRITE) == 0


@linux
def test_cut_and_damaged_messages_stay_inside(guarded: NDArray[np.uint8]) -> None:
    """Messages that end where the memory ends."""
    chance = random.Random(4)
    for (key, side), vectors in message_vectors().items():
        for vector in chance.sample(vectors, 1):
            frame = vector["frame"]
            if len(frame) > ROOM:
                continue
            versions = np.array([vector["api_version"]], np.int16)
            for _ in range(8):
                data = np.frombuffer(frame[: chance.randrange(len(frame) + 1)], np.uint8).copy()
                if len(data) and chance.random() < 0.7:
                    data[chance.randrange(len(data))] = chance.choice((0, 1, 127, 128, 255))
                guarded[ROOM - len(data) :] = data
                start, end = np.array([ROOM - len(data)]), np.array([ROOM])
                decode_columns(plan(key, side), guarded, start, end, versions)


@linux
def test_cut_and_damaged_record_sets_stay_inside(guarded: NDArray[np.uint8]) -> None:
    """Record sets that begin or end where the memory does."""
    rows = [
        {
            "offset": 5 + i,
            "timestamp_ms": 1_700_000_000_000 - i,
            "key": b"k" * i,
            "value": b"v" * 30 if i % 2 else None,
            "headers": [{"key": "name", "value": b"x" * i}] * (i % 3),
        }
        for i in range(4)
    ]
    sets = [encode_batch(rows, codec=codec, is_control=True) for codec in CODEC_NAMES]
    sets += [encode_messages(rows, magic, codec=c) for magic in (0, 1) for c in CODEC_NAMES[:3]]
    rng = random.Random(3)
    cases = [data[:size] for data in sets for size in range(0, len(data), 23)]
    for data in sets:
        for _ in range(15):
            damaged = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(8, len(data))] = rng.choice([0, 1, 127, 128, 255])
            if rng.random() < 0.5:  # a length that fits what is there
                damaged[8:12] = (len(data) - 12).to_bytes(4, "big")
            cases.append(bytes(damaged))
    for data in cases:
        for place in (0, ROOM - len(data)):
            guarded[place : place + len(data)] = np.frombuffer(data, np.uint8)
            list(iter_record_chunks(guarded, np.array([place]), np.array([len(data)])))


def print_columns() -> None:
    """Prints the columns of whole and cut messages, and whether kernels are compiled."""
    print(JIT_ENABLED)
    for key, side in ((0, "request"), (1, "response"), (18, "response"), (75, "response")):
        vectors = message_vectors()[key, side][-2:]
        frames = [one["frame"] for one in vectors]
        frames += [frame[: len(frame) // 2] for frame in frames]
        versions = np.array([one["api_version"] for one in vectors] * 2, np.int16)
        columns = decode_columns(plan(key, side), *batch(frames), versions)
        print(columns.body.to_pylist(), columns.status, columns.marks)
        print(columns.unknown_tags.to_pylist(), columns.error_path(2), columns.error_path(3))


def test_the_kernel_gives_the_same_columns_as_plain_python(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without compilation, and with bounds checks, the columns are the same."""
    print_columns()
    code = "from tests.codec import test_guard; test_guard.print_columns()"
    python = (sys.executable, "-W", "error::RuntimeWarning")
    done = run(*python, "-c", code, KDISSECT_NO_JIT="1")
    assert done.returncode == 0, done.stderr
    compiled, columns = capsys.readouterr().out.split("\n", 1)
    assert (compiled, f"False\n{columns}") == ("True", done.stdout)
