"""The table of fields: what each field of Kafka's messages means, for translation and comparison.

`fields.toml` explains the kinds. A kind follows from Kafka's mark of a field (its entity type) and
from its name. So a field of a new version or API is known if it has one of Kafka's usual names.
Files of `--rules` have rows of the same table.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from uuid import UUID

from kdissect.codec.message import Message
from kdissect.errors import Error
from kdissect.protocol import catalog
from kdissect.protocol.layout import Layout, Slot, layout
from kdissect.protocol.model import Field, Type
from kdissect.protocol.releases import release_number

_FORMAT_VERSION = 1


# The kinds of `fields.toml`: of ids, by the wire types of these; of other values; and of rules that
# give fields no kind.
_Name = Literal["topic", "group", "transactional-id", "member", "resource", "coordinator"]
_Count = Literal["partition", "generation", "leader-epoch"]
_Small = Literal["node", "producer-epoch"]
_Long = Literal["offset", "producer-id"]
_Single = Literal["topic-id", "protocol"]
_AnyId = Literal["opaque", "replicas", "records"]
_Position = Literal["stored-offset", "produced-offset"]
_Other = Literal["session-id", "counter", "time", "text", "server", "ignore", "exact"]
_Rule = Literal["unordered", "tolerance", "equal-modulo"]
FieldKind = _Name | _Count | _Small | _Long | _Single | _AnyId | _Position | _Other | _Rule

_TYPES: dict[FieldKind, tuple[Type, ...]] = {
    **dict.fromkeys(get_args(_Name), (Type.STRING,)),
    **dict.fromkeys(get_args(_Count), (Type.INT32,)),
    **dict.fromkeys(get_args(_Small), (Type.INT16, Type.INT32)),
    **dict.fromkeys(get_args(_Long), (Type.INT64,)),
    "topic-id": (Type.UUID,),
    "protocol": (Type.BYTES,),
    **dict.fromkeys(get_args(_AnyId), tuple(Type)),
}
IDS = frozenset(_TYPES)
_TYPES |= dict.fromkeys(get_args(_Position), (Type.INT64,))
_TYPES |= dict.fromkeys(get_args(_Other), tuple(Type))
_KINDS = [*_TYPES, *get_args(_Rule)]
# A strict comparison allows nothing else.
_STRICT = {*IDS, *get_args(_Position), "session-id", "unordered"}


# -- the table ------------------------------------------------------------------------------------


class RuleError(Error, ValueError):
    """A file of rules says what no rule can: ``file: rule name: what is wrong``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a row of a table is about: places of messages, and pairs of values there. Empty sets fit
    anything."""

    path: tuple[str, ...] = ()
    apis: frozenset[str] = frozenset()
    captured: frozenset[str] = frozenset()
    answered: frozenset[str] = frozenset()

    def is_at(self, api_name: str, path: str, *, below: bool = False) -> bool:
        """path: without indices (``topics[].name``). below: also of what the places contain."""
        if self.apis and api_name not in self.apis:
            return False
        return path_pattern(self.path, below).fullmatch(path) is not None

    def has(self, captured: Any, answered: Any) -> bool:
        return (not self.captured or told(captured) in self.captured) and (
            not self.answered or told(answered) in self.answered
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule(Match):
    """A row of the table; `fields.toml` explains its fields. is_own: of a file of the user."""

    kind: FieldKind
    name: str = ""
    why: str = ""
    entity: str = ""
    where: tuple[tuple[str, re.Pattern[str]], ...] = ()
    key: tuple[tuple[str, ...], ...] = ()
    absolute: float = 0.0
    relative: float = 0.0
    several_brokers: bool = False
    racing: bool = False
    early: bool = False
    is_own: bool = False

    @property
    def is_allowance(self) -> bool:
        """Return whether the rule allows differences, instead of giving fields a kind."""
        return self.kind in ("tolerance", "equal-modulo") or self.ignores_below

    @property
    def ignores_below(self) -> bool:
        """Return whether the rule also allows all differences below its places."""
        return self.is_own and self.kind == "ignore"

    def fits(self, api_name: str, path: str, entity: str = "") -> bool:
        """Return whether the rule is about a place, or about Kafka's mark of it."""
        is_marked = bool(self.entity) and self.entity == entity
        return (is_marked and (not self.apis or api_name in self.apis)) or self.is_at(
            api_name, path, below=self.ignores_below
        )

    def gives_kind_to(self, of: Field) -> bool:
        return not self.is_allowance and of.type in _TYPES.get(self.kind, ())


@dataclass(frozen=True, eq=False)
class FieldTable:
    """All rules of a run, the user's before the built-in ones. fitting: those that fit a place
    which the run has looked up."""

    rules: tuple[FieldRule, ...]
    fitting: set[FieldRule] = dataclasses.field(default_factory=set)

    @cache  # noqa: B019  a run has one table
    def at(self, api_name: str, path: str, entity: str = "") -> tuple[FieldRule, ...]:
        """The rules about one place, in order."""
        found = tuple(rule for rule in self.rules if rule.fits(api_name, path, entity))
        self.fitting.update(found)
        return found

    def kinds(self, api_name: str, path: str, of: Field) -> tuple[FieldRule, ...]:
        """The rules that may give a field its kind, or the elements of an array, in order."""
        return tuple(rule for rule in self.at(api_name, path, of.entity) if rule.gives_kind_to(of))


def load_fields(paths: Sequence[str] = (), *, is_strict: bool = False) -> FieldTable:
    """The table, with the rules of files in front.

    is_strict: of the built-in rules only those about ids and order.
    Raises RuleError, a ValueError, that names the file and the rule.
    """
    rules: list[FieldRule] = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RuleError(f"{path}: {error}") from None
        rules += parse_rules(text, path, is_own=True)
    built_in = built_in_fields().rules
    rules += [rule for rule in built_in if not is_strict or rule.kind in _STRICT]
    return FieldTable(tuple(rules))


@cache
def built_in_fields() -> FieldTable:
    """The table of `fields.toml` alone."""
    text = files(__package__).joinpath("fields.toml").read_text("utf-8")
    return FieldTable(tuple(parse_rules(text, "fields.toml")))


def parse_rules(text: str, source: str, *, is_own: bool = False) -> list[FieldRule]:
    """The rules of a file's text. Raises RuleError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RuleError(f"{source}: {error}") from None
    if document.get("format_version", _FORMAT_VERSION) != _FORMAT_VERSION:
        raise RuleError(f"{source}: format_version is not {_FORMAT_VERSION}")
    unknown = set(document) - {"format_version", "rule"}
    if unknown:
        raise RuleError(f"{source}: {sorted(unknown)[0]!r} is no part of a file of rules")
    rows = document.get("rule", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RuleError(f"{source}: each rule begins with the line [[rule]]")
    return [
        _rule(row, f"{source}: rule {row.get('name', number)}", is_own)
        for number, row in enumerate(rows, 1)
    ]


def _rule(row: dict[str, Any], place: str, is_own: bool) -> FieldRule:
    try:
        if unknown := row.keys() - {each.name for each in dataclasses.fields(FieldRule)}:
            raise ValueError(f"{min(unknown)!r} is no field of a rule")
        for needed in ("kind", "name", "path or entity", *_NEEDED.get(row.get("kind", ""), ())):
            if not any(row.get(name) for name in needed.split(" or ")):
                raise ValueError(f"{needed} is missing")
        rule = FieldRule(**as_fields(row), is_own=is_own)
        for each in dataclasses.fields(rule):
            found = getattr(rule, each.name)
            if each.name != "kind" and not isinstance(found, type(each.default)):
                raise ValueError(f"{each.name} = {found!r} is no {type(each.default).__name__}")
        return rule
    except (AttributeError, TypeError, ValueError) as error:
        raise RuleError(f"{place}: {error}") from None


# What rules of a kind have to say.
_NEEDED = {
    "tolerance": ("absolute or relative",),
    "equal-modulo": ("captured or answered",),
    "unordered": ("key",),
}


def as_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a row as the fields of a `Match`. Raises ValueError."""
    return {name: _READ[name](value) if name in _READ else value for name, value in row.items()}


def _kind(name: str) -> str:
    if name not in _KINDS:
        raise ValueError(f"kind {name!r} is none of {', '.join(_KINDS)}")
    return name


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None


def _names(given: Any) -> tuple[str, ...]:
    names = tuple(given) if isinstance(given, list) else (given,)
    if not all(isinstance(each, str) for each in names):
        raise ValueError(f"{given!r} is no text, and no list of texts")
    return names


def _texts(values: Any) -> frozenset[str]:
    return frozenset(map(told, values if isinstance(values, list) else [values]))


_READ: dict[str, Callable[[Any], Any]] = {
    "kind": _kind,
    "path": _names,
    "apis": lambda names: frozenset(catalog.api(name).name for name in _names(names)),
    "captured": _texts,
    "answered": _texts,
    "keys": _texts,
    "where": lambda where: tuple((name, _pattern(text)) for name, text in where.items()),
    "key": lambda places: tuple(tuple(each.split("|")) for each in _names(places)),
    "absolute": float,
    "relative": float,
    "since": lambda releases: tuple(map(release_number, releases)),
}


def told(value: Any) -> str:
    """A value as the patterns and lists of rules see it; null is empty text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


@cache
def path_pattern(paths: tuple[str, ...], below: bool = False) -> re.Pattern[str]:
    """Matches each place that one of the paths names, or what is below; without indices."""
    places = "|".join(map(_one_path, paths)) or r"(?!)"
    return re.compile(f"(?:{places})" + r"(?:(?:\[\]|\.).*)?" * below)


def _one_path(path: str) -> str:
    """``partition_size`` and ``*.topics[].name`` at any depth, ``topics[].name`` as a whole; ``*``
    within a name."""
    if path == "*":
        return ".*"
    plain = path.removesuffix("[]")
    body = re.escape(path.removeprefix("*.")).replace(r"\*", r"[^.\[\]]*")
    is_whole = ("." in plain or "[" in plain) and not path.startswith("*.")
    return body if is_whole else rf"(?:.*\.)?{body}"


# -- ids in messages ------------------------------------------------------------------------------


class FieldContext(NamedTuple):
    """Topic, partition and group named by the structs around a value; "" or -1: none.

    partition is that of the value's own struct or of one around it. The last are as of the `Step`.
    """

    topic: str = ""
    topic_id: UUID | None = None
    partition: int = -1
    group: str = ""
    step: int = -1
    is_racing: bool = False
    is_early: bool = False


class FieldRef(NamedTuple):
    """An id in a message: holder[slot.name] is it, or its list of values."""

    kind: FieldKind
    slot: Slot
    holder: dict[str, Any]
    around: FieldContext

    @property
    def values(self) -> list[Any]:
        """The elements of an array, or the one value."""
        value = self.holder[self.slot.name]
        return value if isinstance(value, list) else [value]


@dataclass(frozen=True, slots=True)
class ShapeField:
    """A field of a layout with what the table says of it.

    path: without indices. kind: of id that it is, None for other values. rules: those that may give
    it its kind; elements: those that may leave out elements. key: the places of the element's key,
    each with its alternatives.
    """

    slot: Slot
    path: str
    kind: FieldKind | None
    rules: tuple[FieldRule, ...]
    inner: Shape | None = None
    elements: tuple[FieldRule, ...] = ()
    key: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """A layout with the kinds of its fields, by their names. named: for each part of a
    `FieldContext` the field that names it."""

    fields: dict[str, ShapeField]
    named: dict[str, str]

    def within(self, values: Mapping[str, Any], around: FieldContext) -> FieldContext:
        """The context for fields of a struct: topic, partition and group that it names. Those that
        it does not name come from `around`, the context of the struct itself."""
        if not self.named:
            return around
        named = self.named.items()
        found = {of: values[name] for of, name in named if values.get(name) is not None}
        if "topic" in found and "topic_id" not in found:
            found["topic_id"] = None
        return around._replace(**found)


@cache
def shape_of(table: FieldTable, api_key: int, side: str, api_version: int) -> Shape:
    """The shape of a message."""
    api = catalog.api(api_key)
    return _shape(table, api.name, layout(api.side(side), api_version), "")


def _shape(table: FieldTable, api_name: str, of: Layout, path: str) -> Shape:
    fields: dict[str, ShapeField] = {}
    named: dict[str, str] = {}
    for slot in of.by_name.values():
        here, is_array = f"{path}{slot.name}", slot.field.is_array
        element = f"{here}{'[]' * is_array}"
        rules = table.kinds(api_name, here, slot.field)
        elements = table.kinds(api_name, element, slot.field) if is_array else ()
        if slot.inner is None:
            rules += elements
            kinds = [rule.kind for rule in rules]
            for each in kinds if not is_array else ():
                if (part := each.replace("-", "_")) in FieldContext._fields:
                    named.setdefault(part, slot.name)
            kind = next((each for each in kinds if each in IDS or each == "exact"), None)
            if slot.field.type is Type.RECORDS:
                kind = "records"
            fields[slot.name] = ShapeField(slot, here, None if kind == "exact" else kind, rules)
        else:
            inner = _shape(table, api_name, slot.inner, f"{element}.")
            key = _key_of(table, api_name, here, slot.inner) if is_array else ()
            fields[slot.name] = ShapeField(slot, here, None, rules, inner, elements, key)
    return Shape(fields, named)


def _key_of(table: FieldTable, api_name: str, path: str, of: Layout) -> tuple[tuple[str, ...], ...]:
    for rule in table.at(api_name, path):
        if rule.kind == "unordered":
            known = (tuple(name for name in each if name in of.by_name) for each in rule.key)
            return tuple(each for each in known if each)
    return ()


def iter_fields(message: Message) -> Iterator[FieldRef]:
    """Every id in a message's body, in wire order."""
    shape = shape_of(built_in_fields(), message.api_key, message.side, message.api_version)
    yield from _iter_fields(shape, message.body, FieldContext())


def _iter_fields(shape: Shape, values: dict[str, Any], around: FieldContext) -> Iterator[FieldRef]:
    around = shape.within(values, around)
    for name, each in shape.fields.items():
        value = values.get(name)
        if value is None:
            continue
        if each.kind is not None:
            yield FieldRef(each.kind, each.slot, values, around)
        elif each.inner is not None:
            for struct in value if isinstance(value, list) else [value]:
                yield from _iter_fields(each.inner, struct, around)
