"""What the fields of Kafka's messages hold, by hand: see ``message_fields.txt`` beside this."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _parse(text: str) -> dict[tuple[str, str], dict[str, str]]:
    messages: dict[tuple[str, str], dict[str, str]] = {}
    headed: list[dict[str, str]] = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith(" "):
            kind, *paths = words
            for fields in headed:
                assert not fields.keys() & set(paths), line
                fields.update(dict.fromkeys(paths, kind))
        elif words and words[0] != "#":
            *api_names, side = words
            headed = [messages.setdefault((api_name, side), {}) for api_name in api_names]
    return messages


FIELDS = _parse(Path(__file__).with_suffix(".txt").read_text())
"""(API, side) -> path of a field -> kind."""


def holders(body: dict[str, Any], path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(struct, name of its field) of every value at a path; a version may lack it."""
    *outer, name = path.split(".")
    found: list[Any] = [body]
    for step in outer:
        found = [each.get(step) for each in found]
        found = [one for each in found for one in (each if isinstance(each, list) else [each])]
        found = [each for each in found if each is not None]
    return ((each, name) for each in found if name in each)
