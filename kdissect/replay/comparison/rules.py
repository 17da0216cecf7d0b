"""Rules of the comparison, read from TOML: what they allow, and where. `rules.toml` explains."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kdissect.errors import Error
from kdissect.protocol import catalog

_FORMAT_VERSION = 1
_KINDS = ("ignore", "tolerance", "unordered", "translated", "equal-modulo")
TRANSLATIONS = (
    "topic_id", "name", "producer_id", "producer_epoch", "member", "generation", "offset",
    "produced_offset", "leader_epoch", "node", "replication_factor", "opaque", "marked_log",
    "racing", "append_time",
)  # fmt: skip
FOREIGN = ("topic", "group", "transactional_id")
_KNOWN = frozenset(
    {
        "name", "kind", "path", "apis", "why", "where", "absolute", "relative", "key", "as",
        "modulo", "pattern", "classes", "captured", "answered", "foreign", "whole",
        "several_brokers", "racing", "answered_max", "answered_min", "not_emptied",
        "unacknowledged",
    }
)  # fmt: skip


class RuleError(Error, ValueError):
    """A file of rules says what no rule can: ``file: rule name: what is wrong``."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; see `rules.toml` for what the fields mean."""

    name: str
    kind: str
    path: str
    why: str
    apis: frozenset[str] = frozenset()
    where: tuple[tuple[str, re.Pattern[str]], ...] = ()
    absolute: float = 0.0
    relative: float = 0.0
    key: tuple[str, ...] = ()
    translated_as: str = ""
    modulo: str = ""
    pattern: re.Pattern[str] | None = None
    classes: tuple[frozenset[str], ...] = ()
    captured: frozenset[str] = frozenset()
    answered: frozenset[str] = frozenset()
    answered_max: float | None = None  # or as much as captured
    answered_min: float | None = None  # or as little as captured
    not_emptied: bool = False  # an array that had elements has some still
    foreign: str = ""
    is_whole: bool = False
    needs_brokers: bool = False  # only where the capture or the target has several
    needs_race: bool = False  # only if the request reads something that was just changing
    is_unacknowledged: bool = False  # only records of Produce with acks 0, in another order
    is_own: bool = False  # from a file of the user
    matches: re.Pattern[str] = field(default=re.compile(""), compare=False)

    def fits(self, api_name: str, path: str) -> bool:
        """Return whether the rule is about that place; `path` without indices
        (``topics[].name``)."""
        if self.apis and api_name not in self.apis:
            return False
        return self.matches.fullmatch(path) is not None


@dataclass(frozen=True)
class Rules:
    """All rules of a run, the user's before the built-in ones."""

    rules: tuple[Rule, ...]

    def at(self, api_name: str, path: str) -> tuple[Rule, ...]:
        """Those about one place, in order."""
        return _at(self, api_name, path)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@cache
def _at(rules: Rules, api_name: str, path: str) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules.rules if rule.fits(api_name, path))


def load_rules(paths: Sequence[str] = (), *, built_in: bool = True) -> Rules:
    """The rules of files (TOML like `rules.toml`), followed by the built-in ones.

    Raises RuleError, a ValueError, that names the file and the rule.
    """
    rules: list[Rule] = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RuleError(f"{path}: {error}") from None
        rules += parse_rules(text, path, is_own=True)
    if built_in:
        rules += built_in_rules()
    return Rules(tuple(rules))


@cache
def built_in_rules() -> tuple[Rule, ...]:
    text = files(__package__).joinpath("rules.toml").read_text("utf-8")
    return tuple(parse_rules(text, "rules.toml"))


def parse_rules(text: str, source: str, *, is_own: bool = False) -> list[Rule]:
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
    rules = []
    for number, entry in enumerate(document.get("rule", []), 1):
        place = f"{source}: rule {entry.get('name', number)}"
        rules.append(_rule(entry, place, is_own))
    return rules


def _rule(entry: dict[str, Any], place: str, is_own: bool) -> Rule:
    unknown = set(entry) - _KNOWN
    if unknown:
        raise RuleError(f"{place}: {sorted(unknown)[0]!r} is no field of a rule")
    for name in ("name", "kind", "path"):
        if not isinstance(entry.get(name), str) or not entry[name]:
            raise RuleError(f"{place}: {name} is missing")
    kind = entry["kind"]
    if kind not in _KINDS:
        raise RuleError(f"{place}: kind {kind!r} is none of {', '.join(_KINDS)}")
    translated_as = entry.get("as", "")
    if (kind == "translated") != bool(translated_as) or (
        translated_as and translated_as not in TRANSLATIONS
    ):
        raise RuleError(f"{place}: a translated rule says as what: {', '.join(TRANSLATIONS)}")
    if kind == "tolerance" and not (entry.get("absolute") or entry.get("relative")):
        raise RuleError(f"{place}: a tolerance is absolute or relative")
    modulo = entry.get("modulo", "")
    if kind == "equal-modulo" and not (
        modulo in ("presence", "text") or "classes" in entry or "captured" in entry
    ):
        raise RuleError(f"{place}: modulo presence, modulo text, classes or captured is missing")
    if modulo == "text" and "pattern" not in entry:
        raise RuleError(f"{place}: modulo text needs a pattern")
    if entry.get("foreign", FOREIGN[0]) not in FOREIGN:
        raise RuleError(f"{place}: foreign is none of {', '.join(FOREIGN)}")
    apis = frozenset(_api_name(name, place) for name in entry.get("apis", []))
    where = tuple((name, _pattern(text, place)) for name, text in entry.get("where", {}).items())
    return Rule(
        name=entry["name"],
        kind=kind,
        path=entry["path"],
        why=entry.get("why", ""),
        apis=apis,
        where=where,
        absolute=float(entry.get("absolute", 0)),
        relative=float(entry.get("relative", 0)),
        key=tuple(entry.get("key", ())),
        translated_as=translated_as,
        modulo=modulo,
        pattern=_pattern(entry["pattern"], place) if "pattern" in entry else None,
        classes=tuple(_texts(each) for each in entry.get("classes", ())),
        captured=_texts(entry.get("captured", ())),
        answered=_texts(entry.get("answered", ())),
        answered_max=float(entry["answered_max"]) if "answered_max" in entry else None,
        answered_min=float(entry["answered_min"]) if "answered_min" in entry else None,
        not_emptied=bool(entry.get("not_emptied", False)),
        foreign=entry.get("foreign", ""),
        is_whole=bool(entry.get("whole", False)),
        needs_brokers=bool(entry.get("several_brokers", False)),
        needs_race=bool(entry.get("racing", False)),
        is_unacknowledged=bool(entry.get("unacknowledged", False)),
        is_own=is_own,
        matches=path_pattern(entry["path"]),
    )


def _texts(values: Sequence[Any]) -> frozenset[str]:
    return frozenset(value if isinstance(value, str) else str(value).lower() for value in values)


def _api_name(name: str, place: str) -> str:
    try:
        return catalog.api(name).name
    except ValueError as error:
        raise RuleError(f"{place}: {error}") from None


def _pattern(text: str, place: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise RuleError(f"{place}: {text!r} is no regular expression: {error}") from None


def path_pattern(path: str) -> re.Pattern[str]:
    """``partition_size`` at any depth, ``topics[].name`` as a whole; ``*`` within a name."""
    if path == "*":
        return re.compile(".*")
    plain = path.removesuffix("[]")
    body = re.escape(path).replace(r"\*", r"[^.\[\]]*")
    if "." in plain or "[" in plain:
        return re.compile(body)
    return re.compile(r"(?:.*\.)?" + body)
