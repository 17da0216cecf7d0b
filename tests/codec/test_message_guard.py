"""The column kernel never reads outside the buffer, nor writes outside the builders."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from kdissect.codec.message_columns import decode_columns
from kdissect.jit import JIT_ENABLED
from tests.codec.conftest import ROOM
from tests.codec.message_vectors import batch, message_vectors
from tests.conftest import ROOT

linux = pytest.mark.skipif(sys.platform != "linux", reason="guard pages are set with mprotect")


@linux
def test_cut_and_damaged_messages_stay_inside(guarded: NDArray[np.uint8]) -> None:
    """Messages that end where the memory ends: a read outside would end the process."""
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
                decode_columns(key, side, guarded, start, end, versions)


def print_columns() -> None:
    """Prints the columns of whole and cut messages, and whether kernels are compiled."""
    print(JIT_ENABLED)
    for key, side in ((0, "request"), (1, "response"), (18, "response"), (75, "response")):
        vectors = message_vectors()[key, side][-2:]
        frames = [one["frame"] for one in vectors]
        frames += [frame[: len(frame) // 2] for frame in frames]
        versions = np.array([one["api_version"] for one in vectors] * 2, np.int16)
        columns = decode_columns(key, side, *batch(frames), versions)
        print(columns.body.to_pylist(), columns.status, columns.marks)
        print(columns.unknown_tags.to_pylist(), columns.error_path(2), columns.error_path(3))


def test_the_kernel_gives_the_same_columns_as_plain_python(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without compilation, and with bounds checks, the columns are the same."""
    print_columns()
    code = "from tests.codec import test_message_guard as guard; guard.print_columns()"
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"KDISSECT_NO_JIT": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    compiled, columns = capsys.readouterr().out.split("\n", 1)
    assert (compiled, f"False\n{columns}") == ("True", done.stdout)
