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
from dataclasses import replace
from pathlib import PurePath
from typing import NamedTuple
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
_INTEGERS = frozenset({Type.INT8, Type.INT16, Type.UINT16, Type.INT32, Type.UINT32, Type.INT64})
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


class _Line(NamedTuple):
    """A line that is not empty: its number, indentation in spaces, and text."""

    number: int
    indent: int
    text: str


class _LineReader:
    """Parses the lines of one file, front to back."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.lines: list[_Line] = []
        for number, raw in enumerate(text.splitlines(), 1):
            text = raw.rstrip()
            if text:
                stripped = text.lstrip(" ")
                self.lines.append(_Line(number, len(text) - len(stripped), stripped))
        self.at = 0
        self.structs: dict[str, tuple[Field, ...]] = {}
        self.struct_lines: dict[str, int] = {}
        self.open_structs: set[str] = set()
        self.ranges: dict[str, VersionRange] = {}

    def fail(self, reason: str, line: _Line | int | None = None) -> DefinitionError:
        if line is None:
            line = self.lines[min(self.at, len(self.lines) - 1)] if self.lines else 1
        number = line if isinstance(line, int) else line.number
        return DefinitionError(reason, f"{self.source}:{number}")

    def range(self, text: str, line: _Line) -> VersionRange:
        known = self.ranges.get(text)
        if known is not None:
            return known
        if text.endswith("+"):
            parsed = VersionRange(int(text[:-1]), NO_LIMIT)
        else:
            first, _, last = text.partition("-")
            parsed = VersionRange(int(first), int(last or first))
        if parsed.is_empty or parsed.last > NO_LIMIT:
            raise self.fail(f"{text} is no range of versions", line)
        self.ranges[text] = parsed
        return parsed

    def parse(self) -> Iterator[Parsed]:
        if not self.lines:
            raise self.fail("the file is empty")
        while self.at < len(self.lines):
            yield self.block()

    def block(self) -> Parsed:
        notes: list[str] = []
        while self.at < len(self.lines) and self.lines[self.at].text.startswith("#"):
            notes.append(self.lines[self.at].text[1:].strip())
            self.at += 1
        if self.at == len(self.lines):
            raise self.fail("notes are followed by no head")
        line = self.lines[self.at]
        head = _HEAD.match(line.text)
        if head is None or line.indent:
            raise self.fail("expected a head: 'api KEY Name', 'data Name', ...", line)
        self.at += 1
        kind = head["keyed"] or head["kind"]
        key = int(head["key"] or -1)
        common = self.version_ranges(head["ranges"], line) if head["ranges"] else None
        begin = self.at
        self.structs, self.struct_lines = {}, {}
        for position in range(begin, len(self.lines)):
            text = self.lines[position].text
            if self.lines[position].indent == 0:
                if _HEAD.match(text) or text.startswith("#"):
                    break
                if text.startswith("struct "):
                    name = text[7:]
                    if name in self.struct_lines:
                        raise self.fail(f"struct {name} is declared twice", self.lines[position])
                    self.struct_lines[name] = position
        parts: dict[str, tuple[dict[str, VersionRange], tuple[Field, ...]]] = {}
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.indent == 0 and (_HEAD.match(line.text) or line.text.startswith("#")):
                break
            part = _PART.match(line.text)
            if part is None or line.indent:
                raise self.fail(f"expected a part ({', '.join(PARTS[kind])} or struct Name)", line)
            name = part[1]
            if name.startswith("struct "):
                self.struct(name[7:])
                self.at += 1
                self.skip_fields()
                continue
            if name not in PARTS[kind] or name in parts:
                raise self.fail(f"part {name} is not expected here", line)
            ranges = self.version_ranges(part[2], line) if part[2] else common
            if ranges is None:
                raise self.fail(f"the versions of {name} are not said", line)
            self.at += 1
            parts[name] = (ranges, self.fields(2))
        missing = [name for name in PARTS[kind] if name not in parts]
        if missing:
            raise self.fail(f"part {missing[0]} is missing", line)
        return self.result(kind, key, head["name"], tuple(notes), parts)

    def result(
        self,
        kind: str,
        key: int,
        name: str,
        notes: tuple[str, ...],
        parts: dict[str, tuple[dict[str, VersionRange], tuple[Field, ...]]],
    ) -> Parsed:
        definitions = []
        for part in PARTS[kind]:
            ranges, fields = parts[part]
            definitions.append(
                Definition(
                    name=name if part == "fields" else name + part.capitalize(),
                    versions=ranges["versions"],
                    flexible=ranges["flexible"],
                    unstable=ranges["unstable"],
                    fields=fields,
                    kind="message" if kind == "api" or kind in COORDINATOR_KINDS else kind,
                    record_key=key if kind in RECORD_KINDS else -1,
                    notes=() if kind == "api" else notes,
                )
            )
        if kind in COORDINATOR_KINDS:
            definitions = [replace(each, kind=kind) for each in definitions]
        if len(definitions) == 1:
            return definitions[0]
        return Api(key, name, definitions[0], definitions[1], notes)

    def version_ranges(self, text: str, line: _Line) -> dict[str, VersionRange]:
        match = _RANGES.match(text)
        if match is None:
            raise self.fail("expected 'versions R, flexible R, unstable R'", line)
        return {
            name: self.range(match[name], line) if match[name] else NEVER
            for name in ("versions", "flexible", "unstable")
        }

    def skip_fields(self) -> None:
        while self.at < len(self.lines) and self.lines[self.at].indent:
            self.at += 1

    def struct(self, name: str) -> tuple[Field, ...]:
        """The fields of a declared struct, parsed at its declaration on first use."""
        if name in self.structs:
            return self.structs[name]
        if name in self.open_structs:
            raise self.fail(f"struct {name} contains itself")
        resume, self.at = self.at, self.struct_lines[name] + 1
        self.open_structs.add(name)
        self.structs[name] = self.fields(2)
        self.open_structs.discard(name)
        self.at = resume
        return self.structs[name]

    def fields(self, indent: int) -> tuple[Field, ...]:
        parsed: list[Field] = []
        names: set[str] = set()
        lines = self.lines
        while self.at < len(lines):
            line = lines[self.at]
            if line.indent < indent or line.text.startswith("#"):
                break
            if line.indent != indent:
                raise self.fail(f"expected an indentation of {indent} spaces", line)
            self.at += 1
            made = self.field(line)
            if made.name in names and any(
                each.name == made.name and _overlap(each.versions, made.versions) for each in parsed
            ):
                raise self.fail(f"field {made.name} is there twice", line)
            names.add(made.name)
            parsed.append(made)
        return tuple(parsed)

    def field(self, line: _Line) -> Field:
        match = _FIELD.match(line.text)
        if match is None:
            raise self.fail("expected a field: 'name: type R ...'", line)
        (
            name, array, type_name, always_null, versions_text,
            null_text, tag_text, tagged_text, default_text, entity, key, plain,
        ) = match.groups()  # fmt: skip
        versions = self.range(versions_text, line)
        nullable = versions if always_null else NEVER
        if null_text:
            nullable = self.range(null_text, line)
        tagged = NEVER
        if tag_text:
            tagged = self.range(tagged_text, line) if tagged_text else versions
        is_array = array is not None
        kind = _TYPES.get(type_name, Type.STRUCT)
        fields: tuple[Field, ...] = ()
        if kind is Type.STRUCT:
            if not type_name[0].isupper():
                raise self.fail(f"{type_name} is no type", line)
            if self.at < len(self.lines) and self.lines[self.at].indent > line.indent:
                fields = self.fields(line.indent + 2)
            elif type_name in self.struct_lines:
                fields = self.struct(type_name)
            else:
                raise self.fail(f"struct {type_name} is not declared in this file", line)
        default = implied_default(kind, is_array)
        if default_text:
            default = self.default(default_text, kind, is_array, nullable, line)
        return Field(
            name,
            kind,
            versions,
            is_array,
            nullable,
            tagged,
            int(tag_text) if tag_text else -1,
            default,
            plain is not None,
            entity or "",
            key is not None,
            fields,
            type_name if kind is Type.STRUCT else "",
        )

    def default(
        self, text: str, kind: Type, is_array: bool, nullable: VersionRange, line: _Line
    ) -> Default | tuple[()]:
        if text == "null":
            if nullable.is_empty:
                raise self.fail("the default is null, but no version allows null", line)
            return None
        if not is_array:
            if kind is Type.BOOL and text in ("true", "false"):
                return text == "true"
            if kind is Type.STRING and text.startswith('"'):
                return text[1:-1]
            try:
                if kind in _INTEGERS:
                    return int(text, 0)
                if kind is Type.FLOAT64:
                    return float(text)
            except ValueError:
                pass
        raise self.fail(f"{text} is no default of this type", line)


def _overlap(one: VersionRange, other: VersionRange) -> bool:
    return max(one.first, other.first) <= min(one.last, other.last)


def parse(text: str, source: str = "definition") -> list[Parsed]:
    """All APIs and definitions of a file, in its order.

    source: the file's name in errors. An API, and a coordinator's record (its ``request`` is the
    key, its ``response`` the value), is an `Api`; others are `Definition`. Raises DefinitionError
    with ``source:line``.
    """
    return list(_LineReader(text, PurePath(source).name).parse())


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
