"""The packaged definitions, by number and by name. Each file is parsed on first use."""

from __future__ import annotations

import difflib
import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from kdissect.errors import DefinitionError
from kdissect.protocol import grammar
from kdissect.protocol.model import SIDES, Api, Definition, Type, walk

ABORT, COMMIT = 0, 1  # control records of these two types contain an EndTxnMarker


def _folder() -> Traversable:
    return files("kdissect.protocol").joinpath("definitions")


@cache
def _api_files() -> dict[int, Traversable]:
    """API key -> file, ``01_fetch.kdef`` for 1, ascending."""
    files = {
        int(match[1]): entry
        for entry in _folder().iterdir()
        if (match := re.match(r"(\d+)_\w+\.kdef\Z", entry.name))
    }
    return dict(sorted(files.items()))


@cache
def _record_files() -> dict[str, Traversable]:
    """Plain name (`_plain`) of a header, record or data definition -> file."""
    found: dict[str, Traversable] = {}
    for name in ("headers", "records", "embedded"):
        for entry in _folder().joinpath(name).iterdir():
            found[_plain(entry.name.removesuffix(".kdef"))] = entry
    return found


@cache
def _api_names() -> dict[str, int]:
    return {_plain(_stem(entry)): key for key, entry in _api_files().items()}


def _stem(entry: Traversable) -> str:
    return re.sub(r"^\d+_|\.kdef$", "", entry.name)


def _plain(name: str) -> str:
    """A name in the form used for comparison: ``offset_commit`` equals ``OffsetCommit``."""
    return name.replace("_", "").lower()


def _parsed(entry: Traversable) -> list[grammar.Parsed]:
    return grammar.parse(entry.read_text(encoding="utf-8"), entry.name)


@cache
def _api(key: int) -> Api:
    entry = _api_files()[key]
    parsed = _parsed(entry)
    if len(parsed) != 1 or not isinstance(parsed[0], Api) or parsed[0].key != key:
        raise DefinitionError(f"expected api {key} and nothing else", f"{entry.name}:1")
    return parsed[0]


def api(name_or_key: int | str) -> Api:
    """An API by key (1) or name (``Fetch``, ``fetch``, ``FetchRequest``).

    Raises ValueError, with similar names, if there is none.
    """
    if isinstance(name_or_key, int):
        if name_or_key not in _api_files():
            first, *_, last = _api_files()
            raise ValueError(f"no API has key {name_or_key}; known are {first} to {last}")
        return _api(name_or_key)
    plain = _plain(name_or_key)
    if plain.isdigit():
        return api(int(plain))
    for ending in ("", *SIDES):
        key = _api_names().get(plain.removesuffix(ending))
        if key is not None:
            return _api(key)
    raise ValueError(f"no API is named {name_or_key!r}{_hint(near_names(name_or_key))}")


def near_names(name: str) -> list[str]:
    """The names of at most five APIs that are similar to an unknown name."""
    plain = re.sub("(request|response)$", "", _plain(name))
    keys = [_api_names()[each] for each in difflib.get_close_matches(plain, _api_names(), 5, 0.6)]
    inside = [key for each, key in _api_names().items() if plain and plain in each]
    return [_api(key).name for key in dict.fromkeys((*keys, *inside))][:5]


def _hint(names: list[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def apis() -> dict[int, Api]:
    """All APIs by key, ascending."""
    return {key: _api(key) for key in _api_files()}


def has_version(key: int, version: int) -> bool:
    """Return whether any Kafka release has this version of this API."""
    return key in _api_files() and version in _api(key).request.versions


@cache
def may_hold_records(key: int, side: int) -> bool:
    """Return whether messages of that API and side may hold records; True for an unknown API."""
    if key not in apis():
        return True
    return any(field.type is Type.RECORDS for field in walk(api(key).side(SIDES[side]).fields))


@cache
def _record_file(plain: str) -> tuple[Definition, ...]:
    found: list[Definition] = []
    for parsed in _parsed(_record_files()[plain]):
        found += [parsed.request, parsed.response] if isinstance(parsed, Api) else [parsed]
    return tuple(found)


def _file(name: str) -> tuple[Traversable, Definition]:
    """The file that holds a definition, and the definition. Raises ValueError."""
    plain = _plain(name)
    for side in SIDES:
        key = _api_names().get(plain.removesuffix(side)) if plain.endswith(side) else None
        if key is not None:
            return _api_files()[key], _api(key).side(side)
    for stem in (plain, plain.removesuffix("key"), plain.removesuffix("value")):
        if stem in _record_files():
            for each in _record_file(stem):
                if _plain(each.name) == plain:
                    return _record_files()[stem], each
    near = difflib.get_close_matches(plain, list(_record_files()), 5, 0.6)
    names = [each.name for stem in near for each in _record_file(stem)]
    raise ValueError(f"no definition is named {name!r}{_hint(names or near_names(name))}")


@cache
def definition(name: str) -> Definition:
    """A definition by Kafka's name: ``FetchRequest``, ``OffsetCommitValue``, ``RequestHeader``.

    Raises ValueError, with similar names, if there is none.
    """
    return _file(name)[1]


def source(name: str) -> str:
    """The text of the file that holds a definition; `grammar` has its notation."""
    return _file(name)[0].read_text(encoding="utf-8")


@cache
def record_definitions() -> dict[str, Definition]:
    """Definitions of records and opaque data (no messages, no headers), by name."""
    found = {each.name: each for plain in _record_files() for each in _record_file(plain)}
    return {name: each for name, each in sorted(found.items()) if each.kind != "header"}


@cache
def records(log: str) -> dict[int, tuple[Definition | None, Definition]]:
    """Records of a log: type -> (definition of the key, None without keys; of the value).

    log: "group" (``__consumer_offsets``), "transaction" (``__transaction_state``), "share"
    (``__share_group_state``), "metadata" (``__cluster_metadata``) or "control" (control records of
    any topic).
    """
    found: dict[int, tuple[Definition | None, Definition]] = {}
    for plain in _record_files():
        *keys, value = _record_file(plain)
        if value.kind == "control":
            keys = [definition("ControlRecordTypeSchema")]
        if value.kind == log:
            found[value.record_key] = (keys[0] if keys else None, value)
    if log == "control":
        found[COMMIT] = found[ABORT]
    return dict(sorted(found.items()))


REQUEST_HEADER = definition("RequestHeader")
RESPONSE_HEADER = definition("ResponseHeader")
