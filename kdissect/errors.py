"""Errors that kdissect raises to its callers; faults in captured bytes become rows instead."""

from __future__ import annotations


class Error(Exception):
    """Base of all errors that kdissect raises on purpose."""


class CaptureError(Error, ValueError):
    """An input cannot be used at all: a missing file, no capture, no table set."""


class OutputError(Error, ValueError):
    """Results cannot be written where they should go: it exists, or is not writable."""


class QueryError(Error, ValueError):
    """A query cannot be run: its SQL is wrong, or it would do more than read."""


class EnvironmentFailed(Error, RuntimeError):
    """The machine fails: disk full, no Java, a broker unreachable (exit code 3)."""


class DefinitionError(Error, ValueError):
    """A definition file breaks the grammar. `place` is ``file:line``."""

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason = reason
        self.place = place


class DecodeError(Error, ValueError):
    """A message cannot be decoded.

    path: the field that was being read (``responses[0].partitions[3].records``), "" at top. pos:
    byte position in the frame; 0 is the first byte after the size prefix. reason: one short clause.
    message: what was being decoded, such as ``FetchResponse v12``.
    """

    def __init__(self, reason: str, *, path: str = "", pos: int = 0, message: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path
        self.pos = pos
        self.message = message

    def __str__(self) -> str:
        where = " > ".join(part for part in (self.message, self.path) if part)
        return f"{where + ', ' if where else ''}pos {self.pos}: {self.reason}"


class EncodeError(Error, ValueError):
    """A message cannot be encoded: a value does not fit its field. `path` names the field.

    what: the message for the text, such as ``Fetch v12 request``.
    """

    def __init__(self, reason: str, *, path: str = "", what: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path
        self.what = what

    def __str__(self) -> str:
        where = " > ".join(part for part in (self.what, self.path) if part)
        return f"{where}: {self.reason}" if where else self.reason
