"""The output of ``kdissect definitions``: APIs, the layout of one, changes between versions.

Pure functions from the catalog to text, and to plain values for JSON. Unknown names and versions
raise ValueError with similar ones. The text uses the notation of `grammar`; for a single version
without ranges, and with structs in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from uuid import UUID

from kdissect.protocol import catalog, grammar
from kdissect.protocol.model import SIDES, Api, Definition, Field, Type, VersionRange

_FORMAT_VERSION = 1  # of the JSON documents


class Change(NamedTuple):
    """One difference between two versions; `what` is added, removed or changed."""

    side: str
    path: str
    what: str
    before: str
    after: str


# All APIs


def api_list_text() -> str:
    """A table of APIs: key, name, versions, flexible versions, drafts."""
    rows = [("key", "api", "versions", "flexible", "drafts")]
    for api in catalog.apis().values():
        rows.append(
            (
                str(api.key),
                api.name,
                grammar.format_range(api.request.versions),
                _range_or(api.request.flexible, "never"),
                _range_or(api.request.unstable, ""),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].rjust(widths[0])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def api_list_json() -> dict[str, Any]:
    """The same as a document; ``apis`` is a list, ordered by key."""
    return {
        "format_version": _FORMAT_VERSION,
        "apis": [_api_head(api) for api in catalog.apis().values()],
    }


def _range_or(versions: VersionRange, otherwise: str) -> str:
    return otherwise if versions.is_empty else grammar.format_range(versions)


def _api_head(api: Api) -> dict[str, Any]:
    return {
        "api_key": api.key,
        "api_name": api.name,
        "versions": grammar.format_range(api.request.versions),
        "flexible_versions": _range_or(api.request.flexible, "") or None,
        "draft_versions": _range_or(api.request.unstable, "") or None,
        "notes": list(api.notes),
    }


# One API


def api_text(name_or_key: int | str, api_version: int | None = None) -> str:
    """The layout of an API: over all versions, or of one version."""
    api = catalog.api(name_or_key)
    if api_version is None:
        return catalog.source(api.request.name)
    check_version(api, api_version)
    lines = [f"# {note}" for note in api.notes]
    words = [f"api {api.key} {api.name}", f"version {api_version}"]
    if api_version in api.request.flexible:
        words.append("flexible")
    if api_version in api.request.unstable:
        words.append("draft")
    lines.append(", ".join(words))
    headers = {
        "request": api.request_header_version(api_version),
        "response": api.response_header_version(api_version),
    }
    for side in SIDES:
        lines += ["", f"{side}, header {headers[side]}"]
        lines += _version_lines(api.side(side).fields, api_version) or ["  (empty)"]
    return "\n".join(lines) + "\n"


def api_json(name_or_key: int | str, api_version: int | None = None) -> dict[str, Any]:
    """The layout of an API as a document: fields with types and ranges, or those of one version."""
    api = catalog.api(name_or_key)
    if api_version is not None:
        check_version(api, api_version)
    document: dict[str, Any] = {"format_version": _FORMAT_VERSION, **_api_head(api)}
    if api_version is not None:
        document["api_version"] = api_version
        document["request_header_version"] = api.request_header_version(api_version)
        document["response_header_version"] = api.response_header_version(api_version)
    for side in SIDES:
        document[side] = _fields_json(api.side(side).fields, api_version)
    return document


def check_version(api: Api, api_version: int) -> None:
    """Raise ValueError for a version that the API does not have."""
    if api_version not in api.request.versions:
        known = grammar.format_range(api.request.versions)
        raise ValueError(f"{api.name} has no version {api_version}; known are {known}")


def field_words(field: Field, api_version: int) -> str:
    """A field in one version: ``rack: string? tag 1 = null``."""
    name = field.struct_name if field.type is Type.STRUCT else field.type.value
    null = "?" if api_version in field.nullable else ""
    words = [f"{field.name}: {f'[{name}]' if field.is_array else name}{null}"]
    if api_version in field.tagged:
        words.append(f"tag {field.tag}")
    if field.default != grammar.implied_default(field.type, field.is_array) and not (
        field.default is None and not null
    ):
        words.append(f"= {grammar.format_default(field.default)}")
    if field.entity:
        words.append(f"@{field.entity}")
    return " ".join(words)


def _walk(
    fields: tuple[Field, ...], api_version: int | None = None, path: str = ""
) -> Iterator[tuple[str, Field]]:
    """(path, field) at any depth, each before those inside it; of one version, or of all."""
    for field in fields:
        if api_version is None or api_version in field.versions:
            yield path + field.name, field
            yield from _walk(field.fields, api_version, f"{path}{field.name}.")


def _version_lines(fields: tuple[Field, ...], api_version: int) -> list[str]:
    return [
        "  " * (path.count(".") + 1) + field_words(field, api_version)
        for path, field in _walk(fields, api_version)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, int) and abs(value) > 2**53:
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _fields_json(fields: tuple[Field, ...], api_version: int | None) -> list[dict[str, Any]]:
    described_fields = []
    for field in fields:
        if api_version is not None and api_version not in field.versions:
            continue
        described: dict[str, Any] = {
            "name": field.name,
            "type": field.type.value,
            "is_array": field.is_array,
        }
        if api_version is None:
            described["versions"] = grammar.format_range(field.versions)
            described["nullable_versions"] = _range_or(field.nullable, "") or None
            described["tagged_versions"] = _range_or(field.tagged, "") or None
        else:
            described["is_nullable"] = api_version in field.nullable
        if api_version is None or api_version in field.tagged:
            described["tag"] = field.tag if field.tag >= 0 else None
        if field.type is Type.STRUCT:
            described["struct"] = field.struct_name
            described["fields"] = _fields_json(field.fields, api_version)
        else:
            described["default"] = _plain(field.default)
        described["entity"] = field.entity or None
        described_fields.append(described)
    return described_fields


# Two versions of one API


def compare_versions(name_or_key: int | str, before: int, after: int) -> list[Change]:
    """Changes of an API between two of its versions: request first, in wire order."""
    api = catalog.api(name_or_key)
    for version in (before, after):
        check_version(api, version)
    changes: list[Change] = []
    for side in SIDES:
        definition = api.side(side)
        if (before in definition.flexible) != (after in definition.flexible):
            forms = {False: "plain", True: "flexible"}
            was, now = (forms[version in definition.flexible] for version in (before, after))
            changes.append(Change(side, "", "changed", was, now))
        changes += _compare(side, definition, before, after)
    return changes


def _compare(side: str, definition: Definition, before: int, after: int) -> Iterator[Change]:
    old, new = (
        {path: field_words(field, version) for path, field in _walk(definition.fields, version)}
        for version in (before, after)
    )
    for path in dict(_walk(definition.fields)):
        was, now = old.get(path, ""), new.get(path, "")
        parent = path.rpartition(".")[0]
        whole = parent and not (was and now) and (parent not in old or parent not in new)
        if was != now and not whole:  # a struct that is added or removed is one change
            what = "added" if not was else "removed" if not now else "changed"
            yield Change(side, path, what, was, now)


def comparison_text(name_or_key: int | str, before: int, after: int) -> str:
    """The changes between two versions, one per line: ``+`` added, ``-`` removed, ``~`` changed."""
    api = catalog.api(name_or_key)
    changes = compare_versions(api.key, before, after)
    lines = [f"{api.name}: version {before} to {after}"]
    for side in SIDES:
        lines += ["", side]
        side_changes = [change for change in changes if change.side == side]
        for change in side_changes:
            parent = change.path.rpartition(".")[0]
            where = f"{parent}." if parent else ""
            if change.what == "added":
                lines.append(f"  + {where}{change.after}")
            elif change.what == "removed":
                lines.append(f"  - {where}{change.before}")
            elif change.path:
                lines.append(f"  ~ {where}{change.before} -> {change.after.partition(': ')[2]}")
            else:
                lines.append(f"  ~ {change.before} -> {change.after} encoding")
        if not side_changes:
            lines.append("  same bytes")
    return "\n".join(lines) + "\n"


def comparison_json(name_or_key: int | str, before: int, after: int) -> dict[str, Any]:
    """The changes between two versions as a document."""
    api = catalog.api(name_or_key)
    changes = compare_versions(api.key, before, after)
    return {
        "format_version": _FORMAT_VERSION,
        **_api_head(api),
        "before": before,
        "after": after,
        "changes": [change._asdict() for change in changes],
    }
