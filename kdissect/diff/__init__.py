"""Two dissected captures compared, before and after an upgrade."""

from kdissect.diff.compare import KINDS, UnknownKind, compare, failing, parse_kinds

__all__ = ["KINDS", "UnknownKind", "compare", "failing", "parse_kinds"]
