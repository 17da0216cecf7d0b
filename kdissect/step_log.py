"""Logs the steps of a run with counts and durations, for `--debug`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)


@contextmanager
def logged_step(name: str, **counts: int) -> Iterator[dict[str, int]]:
    """Log a step when it ends: its name, duration and counts, which the caller may add to.

    Only counts go into the log, because any text may come from a capture.
    """
    began = time.perf_counter()
    end = "failed after"
    try:
        yield counts
        end = "took"
    finally:
        texts = "".join(f", {key} {value:,}" for key, value in counts.items())
        _log.debug("%s %s %.3f s%s", name, end, time.perf_counter() - began, texts)
