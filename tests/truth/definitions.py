"""Kafka's own definitions, as published in its jars: which field exists in which version.

They guide the comparison and do not come from the product, so that a field that the product forgot,
or reads at the wrong version, shows as a difference. Kafka's files lie in ../shared. `LAYOUTS` has
what the shipped captures need of them, in a form of our own; `python -m tests.truth.definitions`
writes it.
"""

import dataclasses
import functools
import gzip
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.material import DEFINITIONS
from tests.truth.material import SHIPPED

LAYOUTS = SHIPPED / "truth" / "layouts.json.gz"
FETCH_18 = (1, 18)  # `test_request_logs` compares what it leaves out
RELEASES = ("4.3.1", "3.9.1")  # a pair of both has the field names of the newer one
PRIMITIVES = {
    *("bool", "int8", "int16", "uint16", "int32", "uint32", "int64", "float64"),
    *("string", "bytes", "uuid", "records"),
}
NUMBERS = {"int8", "int16", "uint16", "int32", "uint32", "int64"}


def snake_case(name: str) -> str:
    """Field name to column name (as the material beside the repository writes values)."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return name.lower()


def versions_of(text: str | None) -> range:
    """What Kafka's notation ("3", "1-4", "2+", "none") covers."""
    if not text or text == "none":
        return range(0)
    first, _, last = text.rstrip("+").partition("-")
    return range(int(first), 2**15 if text.endswith("+") else int(last or first) + 1)


@dataclass(frozen=True)
class Field:
    """A field as it is in one version. `children` is set for structs and arrays of structs."""

    log_name: str  # in the broker's JSON
    column: str  # in the tables
    type: str  # a primitive's name, or "struct"
    is_array: bool
    is_tagged: bool
    entity: str | None  # "topicName", "groupId", ...: what a string or number names
    default: Any  # as the broker's JSON would show it
    children: "Layout | None"


@dataclass(frozen=True)
class Layout:
    """The fields of a struct in one version; `absent` are the columns of its other versions."""

    fields: tuple[Field, ...]
    absent: frozenset[str]


def structs(layout: Layout, body: dict[str, Any]) -> Iterator[tuple[Layout, dict[str, Any]]]:
    """A body as logged, then each struct in it, in the order of the wire."""
    yield layout, body
    for member in layout.fields:
        value = body.get(member.log_name)
        if member.children is not None and value is not None:
            for inner in value if member.is_array else [value]:
                yield from structs(member.children, inner)


def values(layout: Layout, body: dict[str, Any]) -> Iterator[tuple[Field, Any]]:
    """Each number, string, uuid of a body as logged, elements of arrays one by one, in order."""
    for member in layout.fields:
        value = body.get(member.log_name)
        if value is None:
            continue
        for one in value if member.is_array else [value]:
            if member.children is None:
                yield member, one
            else:
                yield from values(member.children, one)


@functools.cache
def definition(release: str, name: str) -> dict[str, Any] | None:
    path = DEFINITIONS / release / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


@functools.cache
def _shipped() -> dict[str, Any]:
    return json.loads(gzip.decompress(LAYOUTS.read_bytes()))


@functools.cache
def api_names() -> dict[int, str]:
    """API key -> name, the newest release's."""
    if not DEFINITIONS.is_dir():
        return {int(key): name for key, name in _shipped()["api_names"].items()}
    names: dict[int, str] = {}
    for release in RELEASES:
        for path in (DEFINITIONS / release).glob("*Request.json"):
            found = json.loads(path.read_text())
            names.setdefault(found["apiKey"], found["name"].removesuffix("Request"))
    return names


def has_version(api_key: int, api_version: int) -> bool:
    name = api_names().get(api_key)
    if not DEFINITIONS.is_dir():
        return f"{name}Request {api_version}" in _shipped()["layouts"]
    return name is not None and _release_of(name + "Request", api_version) is not None


def layout(api_key: int, side: str, api_version: int) -> Layout:
    """The body of a message, `side` being "Request" or "Response"."""
    name = api_names()[api_key] + side
    if not DEFINITIONS.is_dir():
        return _shipped_layout(name, api_version)
    return _message_layout(name, api_version)


@functools.cache
def _shipped_layout(name: str, api_version: int) -> Layout:
    return _from_json(_shipped()["layouts"][f"{name} {api_version}"])


def _to_json(layout: Layout | None) -> Any:
    """A layout as [[its fields, each as a list], [its absent columns]]; null for none."""
    if layout is None:
        return None
    fields = [
        [
            *(getattr(field, item.name) for item in dataclasses.fields(field)[:-1]),
            _to_json(field.children),
        ]
        for field in layout.fields
    ]
    return [fields, sorted(layout.absent)]


def _from_json(value: Any) -> Layout:
    fields, absent = value
    return Layout(
        tuple(Field(*plain, _from_json(inner) if inner else None) for *plain, inner in fields),
        frozenset(absent),
    )


def write_shipped(logs: Iterable[Path]) -> None:
    """Write `LAYOUTS`: the messages in these request logs."""
    lines = [line for log in logs for line in gzip.decompress(log.read_bytes()).splitlines()]
    entries = [json.loads(line) for line in lines]
    used = sorted({FETCH_18, *((entry["api_key"], entry["api_version"]) for entry in entries)})
    layouts = {
        f"{api_names()[key]}{side} {version}": _to_json(layout(key, side, version))
        for key, version in used
        for side in ("Request", "Response")
    }
    document = {"api_names": api_names(), "layouts": layouts}
    text = json.dumps(document, separators=(",", ":"))
    LAYOUTS.write_bytes(gzip.compress(text.encode(), mtime=0))


def _release_of(name: str, api_version: int) -> str | None:
    for release in RELEASES:
        found = definition(release, name)
        if found and api_version in versions_of(found["validVersions"]):
            return release
    return None


@functools.cache
def _message_layout(name: str, api_version: int) -> Layout:
    release = _release_of(name, api_version)
    assert release is not None, f"no release has {name} v{api_version}"
    mine = definition(release, name)
    others = [definition(r, name) for r in RELEASES]
    return _struct(mine["fields"], _commons(mine), [d for d in others if d], api_version, [])


def _commons(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {common["name"]: common["fields"] for common in found.get("commonStructs", ())}


def _struct(
    fields: list[dict[str, Any]],
    commons: dict[str, list[dict[str, Any]]],
    everywhere: list[dict[str, Any]],
    api_version: int,
    path: list[str],
) -> Layout:
    present = tuple(
        _field(field, commons, everywhere, api_version, path)
        for field in fields
        if api_version in versions_of(field.get("versions", field.get("taggedVersions")))
    )
    columns = {column for found in everywhere for column in _columns_at(found, path)}
    return Layout(present, frozenset(columns - {field.column for field in present}))


def _columns_at(found: dict[str, Any], path: list[str]) -> set[str]:
    """Columns of the struct at a path of columns, over all versions of one definition."""
    fields = found["fields"]
    for step in path:
        inside = [f for f in fields if snake_case(f["name"]) == step]
        if not inside:
            return set()
        element = inside[0]["type"].removeprefix("[]")
        fields = inside[0].get("fields") or _commons(found).get(element, [])
    return {snake_case(field["name"]) for field in fields}


def _field(
    field: dict[str, Any],
    commons: dict[str, list[dict[str, Any]]],
    everywhere: list[dict[str, Any]],
    api_version: int,
    path: list[str],
) -> Field:
    is_array = field["type"].startswith("[]")
    element = field["type"].removeprefix("[]")
    column = snake_case(field["name"])
    children = None
    if element not in PRIMITIVES:
        inner = field.get("fields") or commons[element]
        children = _struct(inner, commons, everywhere, api_version, [*path, column])
        element = "struct"
    return Field(
        log_name=field["name"][0].lower() + field["name"][1:],
        column=column,
        type=element,
        is_array=is_array,
        is_tagged=api_version in versions_of(field.get("taggedVersions")),
        entity=field.get("entityType"),
        default=_default(field.get("default"), element, is_array, children),
        children=children,
    )


def _default(value: Any, element: str, is_array: bool, children: Layout | None) -> Any:
    if value == "null":
        return None
    if is_array:
        return []
    if children is not None:
        return {child.log_name: child.default for child in children.fields}
    if element in NUMBERS:
        return int(str(value or 0), 0)
    if element == "float64":
        return float(value or 0)
    if element == "bool":
        return value in (True, "true")
    if element == "uuid":
        return "A" * 22
    return value or ""  # strings; bytes too, in base64


if __name__ == "__main__":
    write_shipped(sorted(LAYOUTS.parent.glob("*/*.requests.jsonl.gz")))
