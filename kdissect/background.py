"""Calls in a thread of their own, for work that can run beside other work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Background(Generic[Value]):
    """Starts a call at once; `result` waits, then returns its value or raises its error.

    The thread does not keep the process alive: a failing run does not wait for it.
    """

    def __init__(self, call: Callable[[], Value]) -> None:
        self._call = call
        self._values: list[Value] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._values.append(self._call())
        except BaseException as error:  # raised again by `result`
            self._error = error

    def result(self) -> Value:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._values[0]
