"""How much work something is, whatever else the machine does: the lines of kdissect that it runs.

They are counted in a process of their own in which kernels are plain Python, so that every turn of
every loop counts.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.conftest import ROOT

PACKAGE = os.fspath(ROOT / "kdissect") + os.sep


def assert_linear(work: Callable[..., object], size: int, *args: Any) -> None:
    """Twice the size is at most twice the work. `work(*args, size)` is a module's function.

    The work of two sizes is compared with that of one more, so that what comes once does not count:
    exactly 2 where work is linear, 4 where it is quadratic.
    """
    sizes = [size, 2 * size, 4 * size]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.steps", work.__module__, work.__name__,
         json.dumps(args), json.dumps(sizes)],
        env={**os.environ, "KDISSECT_NO_JIT": "1"},
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout.splitlines()[-1])
    print(dict(zip(sizes, steps, strict=True)))
    assert size < steps[0] < steps[1]
    assert steps[2] - steps[1] < 2.5 * (steps[1] - steps[0]), steps


def lines_run(work: Callable[..., object], *args: Any) -> int:
    count = 0

    def in_package(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return in_package

    def entered(frame: FrameType, event: str, _: Any) -> Any:
        return in_package if frame.f_code.co_filename.startswith(PACKAGE) else None

    sys.settrace(entered)
    try:
        work(*args)
    finally:
        sys.settrace(None)
    return count


def main(module: str, name: str, args: str, sizes: str) -> None:
    work, given = getattr(importlib.import_module(module), name), json.loads(args)
    counts = [lines_run(work, *given, size) for size in json.loads(sizes)[:1] + json.loads(sizes)]
    print(json.dumps(counts[1:]))  # the first makes what a process makes once


if __name__ == "__main__":
    main(*sys.argv[1:])
