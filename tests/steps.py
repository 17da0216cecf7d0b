"""How much work something is, whatever else the machine does: the lines of kdissect that it runs.

They are counted in another process in which kernels are plain Python, so that every turn of every
loop counts. All tests of a session share that process.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
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
    counter = _counter()
    assert counter.stdin
    assert counter.stdout
    counter.stdin.write(json.dumps([work.__module__, work.__name__, args, sizes]) + "\n")
    counter.stdin.flush()
    answer = counter.stdout.readline()
    if not answer:
        _counter.cache_clear()
        raise AssertionError(f"{work.__name__} failed: its traceback is on stderr")
    steps = json.loads(answer)
    print(dict(zip(sizes, steps, strict=True)))
    assert size < steps[0] < steps[1]
    assert steps[2] - steps[1] < 2.5 * (steps[1] - steps[0]), steps


@cache
def _counter() -> subprocess.Popen[str]:
    """The process that counts; it ends when its stdin is closed, at the latest with this one."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.steps"],
        env={**os.environ, "KDISSECT_NO_JIT": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


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


def main() -> None:
    for line in sys.stdin:
        module, name, args, sizes = json.loads(line)
        work = getattr(importlib.import_module(module), name)
        with contextlib.redirect_stdout(sys.stderr):
            counts = [lines_run(work, *args, size) for size in sizes[:1] + sizes]
        print(json.dumps(counts[1:]), flush=True)  # the first makes what a process makes once


if __name__ == "__main__":
    main()
