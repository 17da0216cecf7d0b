"""The notation of definition files: text to definitions.

A file describes one API (or one record type) over all its versions::

    # Notes come first, one per line.
    api 36 SaslAuthenticate: versions 0-2, flexible 2+

    request
      auth_bytes: bytes 0+

    response
      error_code: int16 0+
      error_message: string? 0+
      auth_bytes: bytes 0+
      session_lifetime_ms: int64 1+ = 0

A *head* names the content. ``api KEY Name`` has parts ``request`` and ``response``. ``group TYPE
Name``, ``share TYPE Name`` and ``transaction TYPE Name`` are records of a coordinator's topic with
parts ``key`` and ``value``. ``metadata ID Name``, ``control TYPE Name``, ``data Name`` and ``header
Name`` have one part, ``fields``. After the colon of a head, or of a part if parts differ, come
``versions R``, ``flexible R`` (if absent: never) and ``unstable R`` (if absent: none).

A range R is ``3``, ``3-7``, or ``3+`` for 3 and every later version.

A field is one line, ``name: type R``, followed by these in order, as far as they apply:

- ``null R``: versions that allow null; a type written ``string?`` allows it wherever it exists
- ``tag N``: a tagged field; ``tag N R`` if only some of its versions tag it
- ``= value``: its default, which is a number, ``true``, ``false``, ``null`` or a quoted string;
  if absent: 0, false, "", no elements, a struct of defaults
- ``@entity``: the kind of thing that the value names: ``@topicName``, ``@brokerId``, ...
- ``key``: part of the key of its collection in Kafka's classes
- ``plain``: has its non-compact form in flexible versions too

Types are those of `model.Type` in lower case. ``[int32]`` is an array. A name with a capital is a
struct. Its fields follow, indented by two more spaces; or they come from a ``struct Name`` part of
the file, which several fields may share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import PurePath
from uuid import UUID

from kdissect.errors import DefinitionError
from kdissect.protocol.model import (
    NEVER,
    NO_LIMIT,
    Api,
    Default,
    Definition,
    Field,
    Type,
    VersionRange,
)

Parsed = Api | Definition
COORDINATOR_KINDS = ("group", "share", "transaction")
RECORD_KINDS = (*COORDINATOR_KINDS, "metadata", "control")
PARTS = {
    "api": ("request", "response"),
    **dict.fromkeys(COORDINATOR_KINDS, ("key", "value")),
    **dict.fromkeys(("metadata", "control", "data", "header"), ("fields",)),
}

_R = r"\d+(?:\+|-\d+)?"
_HEAD = re.compile(
    rf"(?:(?P<keyed>api|{'|'.join(RECORD_KINDS)}) (?P<key>\d+)|(?P<kind>data|header))"
    r" (?P<name>[A-Z]\w*)(?:: (?P<ranges>.*))?\Z"
)
_PART = re.compile(r"(request|response|key|value|fields|struct [A-Z]\w*)(?:: (.*))?\Z")
_RANGES = re.compile(
    rf"versions (?P<versions>{_R})"
    rf"(?:, flexible (?P<flexible>{_R}))?(?:, unstable (?P<unstable>{_R}))?\Z"
)
_FIELD = re.compile(
    r"(?P<name>[a-z]\w*): (?P<array>\[)?(?P<type>\w+)(?(array)\])(?P<nullable>\?)?"
    rf" (?P<versions>{_R})"
    rf"(?: null (?P<null>{_R}))?"
    rf"(?: tag (?P<tag>\d+)(?: (?P<tagged>{_R}))?)?"
    r"(?: = (?P<default>\"[^\"]*\"|[^ ]+))?"
    r"(?: @(?P<entity>\w+))?(?P<key> key)?(?P<plain> plain)?\Z"
)
_TYPES = {kind.value: kind for kind in Type if kind is not Type.STRUCT}
_INTEGERS = frozenset({Type.INT8, Type.INT16, Type.UINT16, Type.INT32, Type.INT64})
_ZERO: dict[Type, Default] = {
    Type.BOOL: False,
    Type.FLOAT64: 0.0,
    Type.UUID: UUID(int=0),
    Type.STRING: "",
    Type.BYTES: b"",
    Type.RECORDS: None,
    **dict.fromkeys(_INTEGERS, 0),
}


def implied_default(kind: Type, is_array: bool = False) -> Default | tuple[()]:
    """The default of a field without a stated one; ``()`` for no elements or a struct of
    defaults."""
    return () if is_array or kind is Type.STRUCT else _ZERO[kind]


# Text to definitions


@dataclass(slots=True)
class _Line:
    """A line that is not empty, and the lines that are indented below it."""

    number: int
    depth: int
    text: str
    inner: list[_Line] = field(default_factory=list)

    @property
    def is_note(self) -> bool:
        return self.text.startswith("#")


class _Parser:
    """Parses the text of one file. structs: declarations of the current definition."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.structs: dict[str, _Line] = {}
        self.open_structs: list[str] = []

    def fail(self, reason: str, number: int) -> DefinitionError:
        return DefinitionError(reason, f"{self.source}:{number}")

    def lines(self, text: str) -> list[_Line]:
        """The lines without indentation."""
        root = _Line(0, -1, "")
        around = [root]  # the lines around the next one, the innermost last
        for number, raw in enumerate(text.splitlines(), 1):
            if not raw.strip():
                continue
            depth, rest = divmod(len(raw) - len(raw.lstrip(" ")), 2)
            if rest or depth >= len(around):
                spaces = 2 * (len(around) - 1)
                raise self.fail(f"expected an indentation of {spaces} spaces", number)
            line = _Line(number, depth, raw.strip())
            around[depth].inner.append(line)
            around[depth + 1 :] = [line]
        return root.inner

    def definitions(self, text: str) -> Iterator[Parsed]:
        lines = self.lines(text)
        if not lines:
            raise self.fail("the file is empty", 1)
        while lines:
            notes = list(takewhile(lambda line: line.is_note, lines))
            if len(notes) == len(lines):
                raise self.fail("notes are followed by no head", lines[-1].number)
            head, *lines = lines[len(notes) :]
            ends = (at for at, one in enumerate(lines) if one.is_note or _HEAD.match(one.text))
            end = next(ends, len(lines))
            yield self.definition(head, lines[:end], tuple(line.text[1:].strip() for line in notes))
            lines = lines[end:]

    def definition(self, line: _Line, body: list[_Line], notes: tuple[str, ...]) -> Parsed:
        head = _HEAD.match(line.text)
        if head is None:
            raise self.fail("expected a head: 'api KEY Name', 'data Name', ...", line.number)
        kind, key, name = head["keyed"] or head["kind"], int(head["key"] or -1), head["name"]
        common = self.version_ranges(head["ranges"], line) if head["ranges"] else None
        self.structs = {}
        parts: dict[str, tuple[dict[str, VersionRange], list[_Line]]] = {}
        for line in body:
            match = _PART.match(line.text)
            if match is None:
                expected = ", ".join(PARTS[kind])
                raise self.fail(f"expected a part ({expected} or struct Name)", line.number)
            part = match[1]
            if part.startswith("struct "):
                if part[7:] in self.structs:
                    raise self.fail(f"{part} is declared twice", line.number)
                self.structs[part[7:]] = line
                continue
            if part not in PARTS[kind] or part in parts:
                raise self.fail(f"part {part} is not expected here", line.number)
            ranges = self.version_ranges(match[2], line) if match[2] else common
            if ranges is None:
                raise self.fail(f"the versions of {part} are not said", line.number)
            parts[part] = ranges, line.inner
        made = []
        for part in PARTS[kind]:
            if part not in parts:
                raise self.fail(f"part {part} is missing", line.number)
            ranges, inner = parts[part]
            made.append(
                Definition(
                    name=name if part == "fields" else name + part.capitalize(),
                    **ranges,
                    fields=self.fields(inner),
                    kind="message" if kind == "api" else kind,
                    record_key=key if kind in RECORD_KINDS else -1,
                    notes=() if kind == "api" else notes,
                )
            )
        return made[0] if len(made) == 1 else Api(key, name, made[0], made[1], notes)

    def version_ranges(self, text: str, line: _Line) -> dict[str, VersionRange]:
        match = _RANGES.match(text)
        if match is None:
            raise self.fail("expected 'versions R, flexible R, unstable R'", line.number)
        return {
            name: self.range(match[name], line) if match[name] else NEVER
            for name in ("versions", "flexible", "unstable")
        }

    def range(self, text: str, line: _Line) -> VersionRange:
        first, _, last = text.rstrip("+").partition("-")
        parsed = VersionRange(int(first), NO_LIMIT if text.endswith("+") else int(last or first))
        if parsed.is_empty or parsed.last > NO_LIMIT:
            raise self.fail(f"{text} is no range of versions", line.number)
        return parsed

    def fields(self, lines: list[_Line]) -> tuple[Field, ...]:
        parsed: list[Field] = []
        for line in lines:
            made = self.field(line)
            if any(
                each.name == made.name and _overlap(each.versions, made.versions) for each in parsed
            ):
                raise self.fail(f"field {made.name} is there twice", line.number)
            parsed.append(made)
        return tuple(parsed)

    def field(self, line: _Line) -> Field:
        match = _FIELD.match(line.text)
        if match is None:
            raise self.fail("expected a field: 'name: type R ...'", line.number)
        words = match.groupdict()
        versions = self.range(words["versions"], line)
        nullable = versions if words["nullable"] else NEVER
        if words["null"]:
            nullable = self.range(words["null"], line)
        tagged = NEVER
        if words["tag"]:
            tagged = self.range(words["tagged"], line) if words["tagged"] else versions
        is_array = words["array"] is not None
        kind = _TYPES.get(words["type"], Type.STRUCT)
        if kind is not Type.STRUCT and line.inner:
            spaces = 2 * line.depth
            raise self.fail(f"expected an indentation of {spaces} spaces", line.inner[0].number)
        default = implied_default(kind, is_array)
        if words["default"]:
            default = self.default(words["default"], kind, is_array, nullable, line)
        return Field(
            words["name"],
            kind,
            versions,
            is_array,
            nullable,
            tagged,
            int(words["tag"] or -1),
            default,
            words["plain"] is not None,
            words["entity"] or "",
            words["key"] is not None,
            self.struct(words["type"], line) if kind is Type.STRUCT else (),
            words["type"] if kind is Type.STRUCT else "",
        )

    def struct(self, name: str, line: _Line) -> tuple[Field, ...]:
        """The fields of a struct, from below its field's line or from its declaration."""
        if not name[0].isupper():
            raise self.fail(f"{name} is no type", line.number)
        if line.inner:
            return self.fields(line.inner)
        if name not in self.structs:
            raise self.fail(f"struct {name} is not declared in this file", line.number)
        if name in self.open_structs:
            raise self.fail(f"struct {name} contains itself", line.number)
        self.open_structs.append(name)
        fields = self.fields(self.structs[name].inner)
        self.open_structs.pop()
        return fields

    def default(
        self, text: str, kind: Type, is_array: bool, nullable: VersionRange, line: _Line
    ) -> Default | tuple[()]:
        if text == "null":
            if nullable.is_empty:
                raise self.fail("the default is null, but no version allows null", line.number)
            return None
        if not is_array:
            if kind is Type.BOOL and text in ("true", "false"):
                return text == "true"
            if kind is Type.STRING and text.startswith('"'):
                return text[1:-1]
            with suppress(ValueError):
                if kind in _INTEGERS:
                    return int(text, 0)
                if kind is Type.FLOAT64:
                    return float(text)
        raise self.fail(f"{text} is no default of this type", line.number)


def _overlap(one: VersionRange, other: VersionRange) -> bool:
    return max(one.first, other.first) <= min(one.last, other.last)


def parse(text: str, source: str = "definition") -> list[Parsed]:
    """All APIs and definitions of a file, in its order.

    source: the file's name in errors. An API, and a coordinator's record (its ``request`` is the
    key, its ``response`` the value), is an `Api`; others are `Definition`. Raises DefinitionError
    with ``source:line``.
    """
    return list(_Parser(PurePath(source).name).definitions(text))


# Ranges and defaults in the notation


def format_range(versions: VersionRange) -> str:
    """``3``, ``3-7`` or ``3+``."""
    if versions.last == NO_LIMIT:
        return f"{versions.first}+"
    if versions.first == versions.last:
        return str(versions.first)
    return f"{versions.first}-{versions.last}"


def format_default(value: Default | tuple[()]) -> str:
    """A default in the notation."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, int) and value in (2**31 - 1, 2**63 - 1):
        return hex(value)
    return str(value)
