"""Definitions are written as the packaged files are."""

from pathlib import Path

import pytest

from kdissect.protocol import grammar
from tests.builders.notation import EXAMPLE
from tools import definition_text

DEFINITIONS = Path(grammar.__file__).parent / "definitions"


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
