"""Compares two messages of one API field by field, with rules for what may differ.

A difference is a position and two values. A rule makes the values the same (a translated id),
allows them (tolerated), or there is none, and they are different. See `rules.toml`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from kdissect.codec.message import Message
from kdissect.codec.message_codec import UNKNOWN_TAGS
from kdissect.codec.redaction import TEXT, may_hold_secrets
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import error_name
from kdissect.protocol.layout import Layout, Slot, layout
from kdissect.protocol.model import RESPONSE, Type
from kdissect.replay.comparison.equivalence import Meaning
from kdissect.replay.comparison.records import RecordLedger
from kdissect.replay.comparison.rules import Rule, Rules
from kdissect.replay.comparison.value_text import element_text, field_text, records_text, text_of
from kdissect.replay.fields import FieldContext, FieldKind, about, kind_of
from kdissect.replay.model import Difference, ReplayPlan, Step
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import entries, request_fields, request_of

FETCH_APIS = frozenset({ApiKey.FETCH, ApiKey.SHARE_FETCH})
ABSENT = "absent"
TWICE = "it is listed twice"
_SURPLUS = "surplus"  # bytes after the end of the message

Body = dict[str, Any]


_NAMES = FieldKind.TOPIC, FieldKind.TOPIC_ID, FieldKind.GROUP, FieldKind.TRANSACTIONAL_ID


class RequestNames:
    """Topics, groups and transactional ids that the requests of a plan name, as the target calls
    them; others are foreign."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._names: dict[str, set[str]] | None = None

    def is_foreign(self, kind: str, name: str) -> bool:
        if kind == "topic" and name.startswith("__"):
            return True  # made by brokers when they need them
        if self._names is None:
            self._names = self._collect(self._ids.plan)
        return name not in self._names[kind]

    def _collect(self, plan: ReplayPlan) -> dict[str, set[str]]:
        ids = self._ids
        names: dict[str, set[str]] = {"topic": set(), "group": set(), "transactional_id": set()}
        for step in plan.steps:
            if step.skipped is not None:
                continue
            for field in request_fields(step.exchange, *_NAMES):
                if field.kind is FieldKind.TOPIC:
                    names["topic"].update(map(ids.topic, field.values))
                elif field.kind is FieldKind.TOPIC_ID:
                    found = (ids.names.get(each) for each in field.values)
                    names["topic"].update(ids.topic(each) for each in found if each)
                elif field.kind is FieldKind.GROUP:
                    names["group"].update(map(ids.group, field.values))
                else:
                    names["transactional_id"].update(map(ids.transactional_id, field.values))
        return names


class _Shape(NamedTuple):
    """The kinds of a struct's fields, and the fields that other code needs by meaning.

    named: kind -> the field that names the struct's topic, partition, group or transaction.
    """

    kinds: dict[str, FieldKind | None]
    named: dict[FieldKind, str]
    telling: tuple[str, ...]  # error codes and states: other fields follow from them


_ABOUT = frozenset(
    {
        FieldKind.TOPIC,
        FieldKind.TOPIC_ID,
        FieldKind.PARTITION,
        FieldKind.GROUP,
        FieldKind.TRANSACTIONAL_ID,
    }
)


@cache
def _shape_of(api_key: int, of: Layout) -> _Shape:
    api_name = catalog.api(api_key).name
    kinds = {name: kind_of(api_name, name, slot.field) for name, slot in of.by_name.items()}
    named: dict[FieldKind, str] = {}
    for name, kind in kinds.items():
        if kind in _ABOUT and not of.by_name[name].field.is_array:
            named.setdefault(kind, name)
    telling = tuple(
        name
        for name in of.by_name
        if name.endswith(("error_code", "_state")) and kinds[name] is None
    )
    return _Shape(kinds, named, telling)


@cache
def _names_group(api_key: int, api_version: int) -> bool:
    fields = layout(catalog.api(api_key).request, api_version).by_name
    return "group_id" in fields or "transactional_id" in fields


class DiffPosition(NamedTuple):
    """A position in both messages during a comparison.

    path: of the field, with indices.
    plain: the path without indices, as rules have it.
    around: topic, partition, group and transaction named by the enclosing structs.
    captured, answered: the structs that hold the value.
    forced: a rule that allows every difference below this position, or None.
    """

    path: str
    plain: str
    around: FieldContext
    captured: Body
    answered: Body
    forced: Rule | None

    def field(self, name: str) -> DiffPosition:
        dot = "." if self.path else ""
        return self._replace(path=f"{self.path}{dot}{name}", plain=f"{self.plain}{dot}{name}")

    def element(self, index: int, of: Body | None = None) -> DiffPosition:
        """The position of an element; a config has its name instead of the index."""
        key = (of or {}).get("name", index) if self.plain.endswith("configs") else index
        return self._replace(path=f"{self.path}[{key}]", plain=f"{self.plain}[]")


class DiffContext(NamedTuple):
    """Knowledge of a run that all its comparisons share.

    names: of the topics, groups and transactional ids in requests.
    """

    ids: IdMap
    rules: Rules
    meaning: Meaning
    ledger: RecordLedger
    names: RequestNames


class TreeDiff:
    """One comparison. has_other_records: an answer brings more, fewer or other ones."""

    def __init__(self, context: DiffContext, step: Step) -> None:
        self.context = context
        self.rules = context.rules
        self.step = step
        self.api_key = step.exchange.api_key
        self.api_name = step.api_name
        self.differences: list[Difference] = []
        self.has_other_records = False
        self._around: FieldContext | None = None

    def run(self, captured: Message, answer: Message) -> None:
        definition = catalog.api(self.api_key).response
        ours = layout(definition, captured.api_version)
        theirs = layout(definition, answer.api_version)
        place = DiffPosition("", "", self.request_around(), captured.body, answer.body, None)
        self.struct(ours, theirs, captured.body, answer.body, place)
        if captured.surplus != answer.surplus:
            self.leaf(place.field(_SURPLUS), captured.surplus, answer.surplus, None, None)

    def request_around(self) -> FieldContext:
        """Group and transactional id that only the request names."""
        if self._around is None:
            exchange = self.step.exchange
            names_any = _names_group(exchange.api_key, exchange.api_version)
            request = request_of(exchange) if names_any else None
            body = {} if request is None else request.body
            self._around = FieldContext(
                group=body.get("group_id") or "",
                transactional_id=body.get("transactional_id") or "",
            )
        return self._around

    # -- structs and arrays ---------------------------------------------------------------------

    def struct(
        self, captured: Layout, answered: Layout, c: Body, a: Body, place: DiffPosition
    ) -> None:
        shape = _shape_of(self.api_key, captured)
        place = place._replace(around=about(shape.named, c, place.around), captured=c, answered=a)
        for name in shape.telling:
            if name in a and c[name] != a[name] and self._goes_with(place, name, c, a):
                return
        for name, slot in captured.by_name.items():
            other = answered.by_name.get(name)
            if other is not None and not self._is_equal(slot, c[name], a[name]):
                self.value(slot, other, shape.kinds[name], c[name], a[name], place.field(name))
        mine, their = c.get(UNKNOWN_TAGS), a.get(UNKNOWN_TAGS)
        if mine != their:
            self.leaf(place.field(UNKNOWN_TAGS), mine, their, None, None)

    def _goes_with(self, place: DiffPosition, name: str, c: Body, a: Body) -> bool:
        """Return whether a rule for whole structs allows this field: then the rest follows from
        it."""
        here = place.field(name)
        for rule in self.rules.at(self.api_name, here.plain):
            if rule.is_whole and self._allows(rule, here, c[name], a[name], None):
                self._add(here, c[name], a[name], rule)
                return True
        return False

    def value(
        self, slot: Slot, other: Slot, kind: FieldKind | None, c: Any, a: Any, place: DiffPosition
    ) -> None:
        if kind is FieldKind.RECORDS:
            self.records(c, a, place)
            return
        if slot.field.is_array:
            self.array(slot, other, kind, c, a, self._forced(place))
        elif slot.inner is not None and other.inner is not None:
            place = self._forced(place)
            if c is None or a is None:
                self.leaf(place, c, a, None, slot)
            else:
                self.struct(slot.inner, other.inner, c, a, place)
        else:
            self.leaf(place, c, a, kind, slot)

    def _is_equal(self, slot: Slot, c: Any, a: Any) -> bool:
        """Fetched records, and the structs around them, are noted also where they are equal."""
        has_records = slot.inner is not None or slot.field.type is Type.RECORDS
        is_fetched = has_records and self.api_key in FETCH_APIS
        return not is_fetched and type(c) is type(a) and bool(c == a)

    def _forced(self, place: DiffPosition) -> DiffPosition:
        if place.forced is not None:
            return place
        for rule in self.rules.at(self.api_name, place.plain):
            if rule.kind == "ignore" and self._applies(rule, place):
                return place._replace(forced=rule)
        return place

    def array(
        self, slot: Slot, other: Slot, kind: FieldKind | None, c: Any, a: Any, place: DiffPosition
    ) -> None:
        if c is None or a is None:
            if c is not a:
                self.leaf(place, c, a, None, slot)
            return
        rule = self._unordered(place)
        if self.api_key in FETCH_APIS and place.plain == "responses":
            c, a = _each_topic_once(c), _each_topic_once(a)
        if slot.inner is None or other.inner is None:
            self._scalars(slot, kind, c, a, place, rule)
            return
        twice: set[int] = set()
        if rule is not None and rule.key and not _keys_of(rule, slot.inner):
            rule = None  # these elements have no key: compare them by position
        if rule is None:
            pairs: list[tuple[int, int]] = [(i, i) for i in range(min(len(c), len(a)))]
            pairs += [(i, -1) for i in range(len(a), len(c))]
            pairs += [(-1, i) for i in range(len(c), len(a))]
        else:
            pairs, twice = self._matched(slot.inner, rule, c, a, place)
            both = [theirs for mine, theirs in pairs if mine >= 0 and theirs >= 0]
            if both != sorted(both):
                self._add(place, "this order", "another order", rule)
        for mine, theirs in pairs:
            if mine >= 0 and theirs >= 0:
                here = place.element(mine, c[mine])
                self.struct(slot.inner, other.inner, c[mine], a[theirs], here)
            else:
                self._one_sided(c, a, mine, theirs, place, theirs in twice)

    def _unordered(self, place: DiffPosition) -> Rule | None:
        for rule in self.rules.at(self.api_name, place.plain):
            if rule.kind == "unordered":
                return rule
        return None

    def _matched(
        self, inner: Layout, rule: Rule, c: list[Body], a: list[Body], place: DiffPosition
    ) -> tuple[list[tuple[int, int]], set[int]]:
        """(index, index) of elements with equal keys, -1 where one side has none; and the answered
        ones whose key another answered one has."""
        names = _keys_of(rule, inner)
        keys = {each for name in names for each in name.split("|")}
        shape = _shape_of(self.api_key, inner)
        meaning = self.context.meaning
        waiting: dict[Any, list[int]] = {}
        for index, each in enumerate(a):
            waiting.setdefault(_key(each, names), []).append(index)
        pairs = []
        for index, each in enumerate(c):
            around = about(shape.named, each, place.around)
            mapped = {
                name: meaning.key(shape.kinds.get(name), value, each, around, name)
                for name, value in each.items()
                if name in keys or not keys
            }
            found = waiting.get(_key(mapped, names))
            pairs.append((index, found.pop(0) if found else -1))
        twice = set()
        used = {theirs for _, theirs in pairs}
        for left in waiting.values():
            pairs += [(-1, index) for index in left]
            key = _key(a[left[0]], names) if left else None
            if left and any(_key(a[index], names) == key for index in used if index >= 0):
                twice.update(left)
        return pairs, twice

    def _one_sided(
        self,
        c: list[Body],
        a: list[Body],
        captured_at: int,
        answered_at: int,
        place: DiffPosition,
        is_second: bool,
    ) -> None:
        element = c[captured_at] if captured_at >= 0 else a[answered_at]
        here = place.element(captured_at if captured_at >= 0 else answered_at, element)
        if self.api_key in FETCH_APIS and not is_second:
            if self._fetched_one_sided(element, captured_at >= 0, here):
                return
        here = here._replace(
            captured=element if captured_at >= 0 else {},
            answered=element if captured_at < 0 else {},
        )
        if captured_at >= 0 and "error_code" in element:
            # the captured element has an error; without it in the answer, nothing failed
            if self._goes_with(here, "error_code", element, {"error_code": 0}):
                return
        said = element_text(element)
        texts = (said, ABSENT) if captured_at >= 0 else (ABSENT, said)
        self._judge_texts(here, *texts, element, TWICE if is_second else "")

    def _fetched_one_sided(self, element: Body, is_captured: bool, place: DiffPosition) -> bool:
        """An incremental answer names only partitions with something new: one that is not named
        has no records. True where that is all there is to say."""
        if place.plain == "responses[]":
            partitions, is_topic = entries(element["partitions"]), True
        elif place.plain == "responses[].partitions[]":
            partitions, is_topic = [element], False
        else:
            return False
        around = place.around
        if is_topic:
            name, ident = element.get("topic") or "", element.get("topic_id")
            if not is_captured:
                name, ident = self.context.meaning.captured_topic(name, ident)
            around = around._replace(topic=name, topic_id=ident)
        ids = self.context.ids
        name = ids.topic_name(around.topic, around.topic_id)
        for partition in partitions:
            is_asked = ids.offsets.was_asked((name, partition["partition_index"]))
            if not is_captured and (
                partition["error_code"] or not (is_asked or self.api_key != ApiKey.FETCH)
            ):
                return False
        for index, partition in enumerate(partitions):
            here = place._replace(
                around=around._replace(partition=partition["partition_index"]),
                captured=partition if is_captured else {},
                answered=partition if not is_captured else {},
            )
            if is_topic:
                here = here.field("partitions").element(index)
            if partition["error_code"]:
                if not self._goes_with(here, "error_code", partition, {"error_code": 0}):
                    self.leaf(here.field("error_code"), partition["error_code"], 0, None, None)
                continue
            data = partition["records"] or b""
            mine, theirs = (data, b"") if is_captured else (b"", data)
            self.records(mine, theirs, here.field("records"))
        return True

    def _scalars(
        self, slot: Slot, kind: FieldKind | None, c: list[Any], a: list[Any], place: DiffPosition,
        rule: Rule | None,
    ) -> None:  # fmt: skip
        meaning = self.context.meaning
        mapped = [meaning.key(kind, each, place.captured, place.around, "") for each in c]
        if mapped == a:
            return
        element_rule = rule or self._unordered(place.element(0))
        if element_rule is not None and Counter(map(_hashable, mapped)) == Counter(
            map(_hashable, a)
        ):
            self._add(place, "this order", "another order", element_rule)
            return
        if place.forced is not None or len(c) != len(a):
            self.leaf(place, c, a, None, slot)
            return
        for index, (mine, theirs) in enumerate(zip(c, a, strict=True)):
            if mine != theirs:
                self.leaf(place.element(index), mine, theirs, kind, slot)

    # -- values ---------------------------------------------------------------------------------

    def records(self, c: bytes | None, a: bytes | None, place: DiffPosition) -> None:
        around = place.around
        log = (
            self.context.ids.topic_name(around.topic, around.topic_id),
            around.partition,
        )
        earlier = self.context.ids.share_records.get((self.step.number, log))
        if earlier is not None:
            a = earlier + (a or b"")
        found, is_uneven = self.context.ledger.compare(
            self.step.number, place.path, log, c or b"", a or b""
        )
        if found or is_uneven:
            self.has_other_records = True
        for behind, mine, theirs, note in found:
            here = place._replace(
                path=place.path + behind, plain=f"{place.plain}[]{behind.partition(']')[2]}"
            )
            self._judge_texts(here, mine, theirs, None, note)
        if is_uneven:
            self._judge_texts(
                place, records_text(c or b""), records_text(a or b""), None,
                "more or fewer of the same records",
            )  # fmt: skip

    def leaf(
        self, place: DiffPosition, c: Any, a: Any, kind: FieldKind | None, slot: Slot | None
    ) -> None:
        if place.forced is not None:
            self._add(place, c, a, place.forced)
            return
        for rule in self.rules.at(self.api_name, place.plain):
            if not self._allows(rule, place, c, a, kind):
                continue
            if rule.kind == "translated" and not self.context.meaning.is_noted(rule.translated_as):
                return
            self._add(place, c, a, rule)
            return
        self._add(place, c, a, None)

    def _judge_texts(
        self, place: DiffPosition, c: str, a: str, element: Body | None, note: str = ""
    ) -> None:
        """A difference that is no pair of plain values."""
        rule = place.forced
        if rule is None:
            for each in self.rules.at(self.api_name, place.plain):
                if each.kind == "ignore" and self._applies(each, place, element):
                    rule = each
                    break
        self.differences.append(
            Difference(place.path, c, a, "" if rule is None else rule.name, note)
        )

    def _applies(self, rule: Rule, place: DiffPosition, element: Body | None = None) -> bool:
        if rule.is_unacknowledged:
            return False  # after the run: `Comparator._allow_reordered`
        if rule.needs_race and not self.step.is_racing:
            return False
        holder: Mapping[str, Any] = element or place.captured or place.answered
        for name, pattern in rule.where:
            if name not in holder or not pattern.search(text_of(holder[name], "")):
                return False
        if rule.needs_brokers and not self.context.ids.has_several_brokers:
            return False
        if rule.foreign:
            return element is not None and self._is_foreign(rule.foreign, element, place)
        return element is not None or _is_in_bounds(rule, place)

    def _is_foreign(self, kind: str, element: Body, place: DiffPosition) -> bool:
        names = {
            "topic": ("name", "topic", "topic_name"),
            "group": ("group_id",),
            "transactional_id": ("transactional_id",),
        }[kind]
        for name in names:
            value = element.get(name)
            if value:
                if place.captured:  # the capture's name
                    ids = self.context.ids
                    renames = {"topic": ids.topic, "group": ids.group}
                    value = renames.get(kind, ids.transactional_id)(value)
                return self.context.names.is_foreign(kind, value)
        return False

    def _allows(
        self, rule: Rule, place: DiffPosition, c: Any, a: Any, kind: FieldKind | None
    ) -> bool:
        if rule.kind == "unordered" or not self._applies(rule, place):
            return False
        if rule.kind == "ignore":
            return not place.plain.endswith("[]")
        if rule.kind == "translated":
            return self.context.meaning.same(
                rule.translated_as, kind, c, a, place.around, place.captured, self.step, place.path
            )
        if rule.kind == "tolerance":
            if not _is_number(c) or not _is_number(a):
                return False
            return bool(abs(a - c) <= max(rule.absolute, rule.relative * abs(c)))
        return _equal_modulo(rule, c, a)

    def _add(self, place: DiffPosition, c: Any, a: Any, rule: Rule | None) -> None:
        field = place.plain.rpartition(".")[2]
        holders = place.captured, place.answered
        if field == _SURPLUS and may_hold_secrets(self.api_key, RESPONSE):
            c, a = c and TEXT, a and TEXT  # nobody knows what these bytes are
        then, now = (field_text(field, value, *holders) for value in (c, a))
        name = "" if rule is None else rule.name
        self.differences.append(Difference(place.path, then, now, name, self._note(place, c, a)))

    def _note(self, place: DiffPosition, c: Any, a: Any) -> str:
        if place.plain.endswith("error_code") and isinstance(c, int) and isinstance(a, int):
            return f"{error_name(c)} then, {error_name(a)} now"
        return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _equal_modulo(rule: Rule, c: Any, a: Any) -> bool:
    if rule.modulo == "presence":
        return _is_set(c) == _is_set(a)
    mine, theirs = text_of(c, "null"), text_of(a, "null")
    if rule.modulo == "text" and rule.pattern is not None:
        return rule.pattern.sub("", mine) == rule.pattern.sub("", theirs)
    if rule.captured:
        return mine in rule.captured and (not rule.answered or theirs in rule.answered)
    return any(mine in each and theirs in each for each in rule.classes)


def _is_set(value: Any) -> bool:
    return not (value is None or value == -1 or value in ("", b""))


def _keys_of(rule: Rule, of: Layout) -> list[str]:
    """The fields of a rule's key that a struct has."""
    return [name for name in rule.key if any(each in of.by_name for each in name.split("|"))]


def _each_topic_once(topics: list[Body]) -> list[Body]:
    """Merge entries of the same topic: some brokers split its partitions over several entries."""
    merged: dict[Any, Body] = {}
    for topic in topics:
        key = topic.get("topic") or topic.get("topic_id")
        found = merged.setdefault(key, topic)
        if found is not topic:
            merged[key] = {**found, "partitions": [*found["partitions"], *topic["partitions"]]}
    return topics if len(merged) == len(topics) else list(merged.values())


def _key(values: Mapping[str, Any], names: list[str]) -> Any:
    """A hashable key of an array's element: the values of the named fields, or all its values.

    ``a|b`` stands for the first of these fields that has a value.
    """
    if not names:
        return _hashable(dict(values))
    found = []
    for name in names:
        said = (values.get(each) for each in name.split("|"))
        found.append(_hashable(next((each for each in said if each not in (None, "")), None)))
    return tuple(found)


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((name, _hashable(inner)) for name, inner in value.items()))
    if isinstance(value, list):
        return tuple(_hashable(each) for each in value)
    return "\0null" if value is None else value


def _is_in_bounds(rule: Rule, place: DiffPosition) -> bool:
    """Return whether the answered value is one that the rule's bounds allow."""
    name = place.plain.rpartition(".")[2]
    captured, answered = place.captured.get(name), place.answered.get(name)
    if isinstance(answered, (int, float)):
        known = captured if isinstance(captured, (int, float)) else 0
        if rule.answered_max is not None and answered > max(rule.answered_max, known):
            return False
        if rule.answered_min is not None and answered < min(rule.answered_min, known):
            return False
    return not (rule.not_emptied and captured and not answered)
