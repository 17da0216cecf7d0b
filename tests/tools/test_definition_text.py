"""Definitions are written as the packaged files are."""

from pathlib import Path

import pytest

from kdissect.protocol import grammar
from tools import definition_text

DEFINITIONS = Path(grammar.__file__).parent / "definitions"

EXAMPLE = """\
# A note about it.
# And another.
api 99 Invented

request: versions 0-7, flexible 4+, unstable 7
  name: string? 0+ = null @topicName
  legacy: string 0-3 null 2-3
  size_max: int64 3+ = 0x7fffffffffffffff
  on: bool 1+ = true
  label: string 0+ = "some words"
  id: int32 0+ key plain
  epoch: int32 4+ tag 0 = -1 @brokerId
  late: [int32]? 4+ tag 1 5+ = null

response: versions 0-8
  results: [Result] 0+
  others: [Result]? 2+

struct Result
  code: int16 0+
"""


def test_writing_gives_the_text_back():
    """An example with each word of the notation is written as it was read."""
    (api,) = grammar.parse(EXAMPLE)
    assert definition_text.format(api) == EXAMPLE


@pytest.mark.parametrize("path", sorted(DEFINITIONS.rglob("*.kdef")), ids=lambda path: path.stem)
def test_packaged_files_are_as_they_would_be_written(path):
    """No shipped definition differs from its formatted text."""
    if path.name == "releases.kdef":
        return
    text = path.read_text(encoding="utf-8")
    assert "\n".join(map(definition_text.format, grammar.parse(text, path.name))) == text
