"""Writes definitions in the notation of `kdissect.protocol.grammar`."""

from collections.abc import Iterator

from kdissect.protocol.grammar import (
    PARTS,
    RECORD_KINDS,
    Parsed,
    format_default,
    format_range,
    implied_default,
)
from kdissect.protocol.model import Api, Definition, Field, Type


def format_field(field: Field) -> str:
    """The line of a field, without indentation and without a struct's fields."""
    name = field.struct_name if field.type is Type.STRUCT else field.type.value
    words = [
        f"{field.name}: {f'[{name}]' if field.is_array else name}"
        f"{'?' if field.nullable == field.versions else ''}",
        format_range(field.versions),
    ]
    if not field.nullable.is_empty and field.nullable != field.versions:
        words.append(f"null {format_range(field.nullable)}")
    if field.tag >= 0:
        words.append(f"tag {field.tag}")
        if field.tagged != field.versions:
            words.append(format_range(field.tagged))
    if field.default != implied_default(field.type, field.is_array):
        words.append(f"= {format_default(field.default)}")
    if field.entity:
        words.append(f"@{field.entity}")
    if field.map_key:
        words.append("key")
    if field.never_flexible:
        words.append("plain")
    return " ".join(words)


def _structs(fields: tuple[Field, ...]) -> Iterator[Field]:
    for field in fields:
        if field.type is Type.STRUCT:
            yield field
            yield from _structs(field.fields)


def _shared(definitions: list[Definition]) -> dict[str, tuple[Field, ...]]:
    """Structs to declare once: those with the same name and fields in several places."""
    seen: dict[str, list[tuple[Field, ...]]] = {}
    for definition in definitions:
        for field in _structs(definition.fields):
            seen.setdefault(field.struct_name, []).append(field.fields)
    shared = {}
    for name, uses in seen.items():
        often = max(uses, key=uses.count)
        if uses.count(often) > 1:
            shared[name] = often
    return shared


def _field_lines(
    fields: tuple[Field, ...], indent: int, shared: dict[str, tuple[Field, ...]]
) -> Iterator[str]:
    for field in fields:
        yield " " * indent + format_field(field)
        if field.type is Type.STRUCT and shared.get(field.struct_name) != field.fields:
            yield from _field_lines(field.fields, indent + 2, shared)


def _ranges(definition: Definition) -> str:
    words = f": versions {format_range(definition.versions)}"
    if not definition.flexible.is_empty:
        words += f", flexible {format_range(definition.flexible)}"
    if not definition.unstable.is_empty:
        words += f", unstable {format_range(definition.unstable)}"
    return words


def format(parsed: Parsed) -> str:
    """The text of an API or a definition; `grammar.parse` returns the same object from it."""
    if isinstance(parsed, Api):
        definitions = [parsed.request, parsed.response]
        kind = "api" if parsed.request.kind == "message" else parsed.request.kind
        head = f"{kind} {parsed.key} {parsed.name}"
    else:
        definitions = [parsed]
        kind = parsed.kind
        head = f"{kind} {parsed.record_key if kind in RECORD_KINDS else ''} {parsed.name}"
        head = " ".join(head.split())
    ranges = [_ranges(definition) for definition in definitions]
    same = len(set(ranges)) == 1
    lines = [f"# {note}" for note in parsed.notes]
    lines.append(head + (ranges[0] if same else ""))
    shared = _shared(definitions)
    for part, definition, its_ranges in zip(PARTS[kind], definitions, ranges, strict=True):
        lines += ["", part + ("" if same else its_ranges)]
        lines += _field_lines(definition.fields, 2, shared)
    for name, fields in shared.items():
        lines += ["", f"struct {name}"]
        lines += _field_lines(fields, 2, shared)
    return "\n".join(lines) + "\n"
