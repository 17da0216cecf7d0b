"""Compares two dissected captures, for example before and after an upgrade."""

from kdissect.diff.compare import (
    KINDS,
    NOT_COMPARED,
    OPEN,
    UNDECIDED,
    UnknownKind,
    compare,
    failing,
    parse_kinds,
)

__all__ = [
    "KINDS",
    "NOT_COMPARED",
    "OPEN",
    "UNDECIDED",
    "UnknownKind",
    "compare",
    "failing",
    "parse_kinds",
]
