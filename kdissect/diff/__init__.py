"""Compares two dissected captures, for example before and after an upgrade."""

from kdissect.diff.compare import (
    KINDS,
    UNDECIDED,
    UnknownKind,
    compare,
    failing,
    parse_kinds,
)

__all__ = [
    "KINDS",
    "UNDECIDED",
    "UnknownKind",
    "compare",
    "failing",
    "parse_kinds",
]
