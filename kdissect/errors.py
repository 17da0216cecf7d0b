"""Errors that kdissect raises. Faults in captured bytes become rows; these are for callers."""

from __future__ import annotations


class Error(Exception):
    """Base of every error that kdissect raises on purpose."""


class CaptureError(Error, ValueError):
    """Nothing of an input can be used: a missing file, no capture, no table set."""


class OutputError(Error, ValueError):
    """The place for the results cannot be used: it exists, or cannot be written."""


class EnvironmentFailed(Error, RuntimeError):
    """The machine failed us: disk full, no Java, a broker gone (exit code 3)."""


class DefinitionError(Error, ValueError):
    """A definition file does not follow the grammar. `place` is ``file:line``."""

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason = reason
        self.place = place


class DecodeError(Error, ValueError):
    """A message cannot be decoded.

    path: field path of what was being read (``responses[0].partitions[3].records``), "" at top.
    pos: byte position in the frame (0 is the first byte after the size prefix).
    reason: one short clause.
    """

    def __init__(self, reason: str, *, path: str = "", pos: int = 0, message: str = "") -> None:
        where = " > ".join(part for part in (message, path) if part)
        super().__init__(f"{where + ', ' if where else ''}pos {pos}: {reason}")
        self.reason = reason
        self.path = path
        self.pos = pos


class EncodeError(Error, ValueError):
    """A message cannot be encoded: a value does not fit its field. `path` names the field.

    what: the message, as in ``Fetch v12 request``, for the text.
    """

    def __init__(self, reason: str, *, path: str = "", what: str = "") -> None:
        where = " > ".join(part for part in (what, path) if part)
        super().__init__(f"{where}: {reason}" if where else reason)
        self.reason = reason
        self.path = path
