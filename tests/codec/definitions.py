"""Definitions that tests of both decoders make up."""

from kdissect.protocol import grammar

SHAPE = """\
  id: int32 0+
  names: [string] 0+
  topics: [Topic]? 0+
    name: string 0+
    parts: [int32] 0+
    extra: bytes? 1+ tag 3 = null
  cursor: Cursor? 0+ = null
    at: int64 0+
  late: Late 1+ tag 5
    x: int16 1+
    y: int16 1+
"""


def of(text, name="Test"):
    """A definition from the lines of its fields."""
    (made,) = grammar.parse(f"data {name}: versions 0-1, flexible 1+\n\nfields\n{text}")
    return made
