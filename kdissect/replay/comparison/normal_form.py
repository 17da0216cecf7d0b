"""Messages as trees in the vocabulary of the capture, and the differences of two trees.

Messages of the capture and of a target use other ids for the same thing. `Normaliser` turns a
captured response, a target's answer and a reference's answer into trees, and `compare` compares two
trees without knowing any id, API or rule: ids have become the captured names, offsets positions in
the captured log, sets are keyed by the names of their elements, and what the table of fields leaves
to the server is gone.

    struct             dict: field -> tree
    array of structs   Keyed: text of the key, or else the place -> tree of the element
    value              itself, or `Chosen` (only whether it is set counts)

In a struct whose error code or state differs, the other fields follow from that: only the code or
state is a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from kdissect.codec.message import Message
from kdissect.codec.message_codec import UNKNOWN_TAGS
from kdissect.codec.redaction import is_secret
from kdissect.replay import fields
from kdissect.replay.fields import FieldContext, FieldKind, FieldRule, Shape, ShapeField, told
from kdissect.replay.model import ABSENT, Difference, ReplayPlan, Step
from kdissect.replay.translation.groups import with_topics
from kdissect.replay.translation.id_map import IdMap, Producer, Producers, limited, resource_word
from kdissect.replay.workload.messages import Body, MessageTopics, api_name, request_body

_LEFT_OUT = ("ignore", "server")
# Kinds of values that are the cluster's choice
_CHOSEN = frozenset(("generation", "leader-epoch", "counter", "time", "text"))
_A_BROKER = "a broker"
SURPLUS = "surplus"  # bytes after the end of a message
AGAIN = " again"
Tree = Any


@dataclass(frozen=True, slots=True)
class Chosen:
    """A value that the cluster chooses: only whether it is set is compared."""

    value: Any


def plain(value: Any) -> Any:
    """The value that stands in a message, to show it."""
    return value.value if isinstance(value, Chosen) else value


def is_set(value: Any) -> bool:
    return plain(value) not in (None, "", b"", -1, ABSENT)


class Keyed(dict[str, Tree]):
    """The elements of an array; the key of one that is listed twice has `AGAIN` behind."""

    def add(self, key: str, element: Tree) -> None:
        while key in self:
            key += AGAIN
        self[key] = element


Names = Mapping[FieldKind | None, set[str]]


def requested(plan: ReplayPlan) -> Names:
    """Topics, groups and transactional ids that the requests of a plan name; others are foreign."""
    sent = [step for step in plan.steps if step.skipped is None]
    topics, groups, ids = (
        {name for step in sent for name in step.named(kind)}
        for kind in ("topic", "group", "transactional-id")
    )
    return {"topic": topics, "topic-id": topics, "group": groups, "transactional-id": ids}


class Normaliser:
    """Makes trees of one side's messages, after the run: the `IdMap` knows all that answers tell.

    named: elements with other names are left out. keeps_server: whether fields of kind `server`
    stay, by their other rules: they do if the other tree is a reference's. topics: their captured
    names.
    """

    def __init__(
        self,
        ids: IdMap,
        table: fields.FieldTable,
        named: Names,
        *,
        is_target: bool,
        keeps_server: bool,
    ) -> None:
        self._ids, self._table, self._named = ids, table, named
        self._is_target, self._keeps_server = is_target, keeps_server
        self.topics: MessageTopics = ids.target_topics if is_target else ids.names
        self._names: dict[tuple[str, str], str] = ids.options.old_names if is_target else {}
        self._nodes = frozenset(ids.target.nodes if is_target else ids.captured_nodes)
        self._producers, self._brokers = Producers(), dict[str, str]()
        self._opaque = {
            (name, new if is_target else old): old for (name, old), new in ids.opaque.items()
        }
        if is_target:
            for captured_producer, producer in ids.producers.targets.items():
                self._producers.learn(producer, captured_producer)
            for node in ids.captured_nodes:
                self._brokers.setdefault(str(ids.node(node)), str(node))

    def tree(self, step: Step, message: Message) -> Body:
        """The tree of a response to a step's request."""
        shape = fields.shape_of(self._table, message.api_key, "response", message.api_version)
        asked = request_body(step.exchange)  # names what the response may not
        group = asked.get("group_id") or ""
        of_step = step.number, step.is_racing, step.is_early
        request = FieldContext("", None, -1, group, *of_step)
        tree = self._struct(shape, message.body, shape.within(message.body, request))
        if message.surplus:
            tree[SURPLUS] = message.surplus
        return tree

    # -- structs and arrays -------------------------------------------------------------------

    def _struct(self, shape: Shape, values: Body, around: FieldContext) -> Body:
        """around: the context of the struct's fields."""
        tree: Body = {}
        for name, each in shape.fields.items():
            value = values.get(name)
            kind = self._kind(each.rules, values, around)
            if kind in (*_LEFT_OUT, "session-id") or each.kind == "records":  # see `logs`
                continue
            if value is None:
                tree[name] = None if kind not in _CHOSEN else Chosen(None)
            elif each.inner is None:
                tree[name] = self._word(kind, name, value, values, around)
            elif each.slot.field.is_array:
                tree[name] = self._array(each, each.inner, value, around)
            else:
                tree[name] = self._struct(each.inner, value, each.inner.within(value, around))
        if values.get(UNKNOWN_TAGS):
            tree[UNKNOWN_TAGS] = values[UNKNOWN_TAGS]
        return tree

    def _kind(
        self, rules: tuple[FieldRule, ...], values: Body, around: FieldContext
    ) -> FieldKind | None:
        for rule in rules:
            if self.applies(rule, around, values):
                return rule.kind
        return None

    def applies(self, rule: FieldRule, read: Step | FieldContext, values: Body) -> bool:
        """Return whether the conditions of a rule hold in a struct."""
        if (rule.racing or rule.early) and not (read.is_racing or (rule.early and read.is_early)):
            return False
        if rule.kind == "server" and self._keeps_server:
            return False
        has_one_broker = max(len(self._ids.captured_nodes), len(self._ids.target.nodes)) < 2
        if rule.several_brokers and has_one_broker:
            return False
        return all(
            name in values and pattern.search(told(values[name])) for name, pattern in rule.where
        )

    def _array(
        self, of: ShapeField, inner: Shape, values: list[Body], around: FieldContext
    ) -> Tree:
        elements = Keyed()
        for place, each in enumerate(values):
            if of.elements and self._kind(of.elements, each, around) in _LEFT_OUT:
                continue
            here = inner.within(each, around)
            key, kind = str(place), None
            if of.key:
                key, kind = self._element_key(of, inner, each, here)
            if kind in self._named and key not in self._named[kind]:
                continue  # no request names it
            tree = self._struct(inner, each, here)
            if key not in elements or not _merges(elements[key], tree, of.key):
                elements.add(key, tree)
        return elements

    def _element_key(
        self, of: ShapeField, inner: Shape, values: Body, around: FieldContext
    ) -> tuple[str, FieldKind | None]:
        """The text of an element's key, and the kind of name that it is, if it is one."""
        parts, named = [], None
        for alternatives in of.key:
            name = next((each for each in alternatives if values.get(each) not in (None, "")), "")
            if not name:
                continue
            value = values[name]
            kind = self._kind(inner.fields[name].rules, values, around)
            if kind in _LEFT_OUT:
                continue
            if name == "api_key":
                value = api_name(value)
            elif name == "resource_type":
                value = resource_word(values)
            elif isinstance(value, list):
                value = ", ".join("=".join(told(one) for one in each.values()) for each in value)
            else:
                word = self._word(kind, name, value, values, around)
                value = plain(word)
                if isinstance(word, Chosen):
                    kind = None  # a topic id without a name: only who asks by it is answered
            named = named or kind
            parts.append(told(value))
        return " ".join(parts), named

    # -- values ---------------------------------------------------------------------------------

    def _name(self, kind: str, name: str) -> str:
        return self._names.get((kind, name), name)

    def _word(
        self, kind: FieldKind | None, name: str, value: Any, holder: Body, around: FieldContext
    ) -> Any:
        """The word for a value in a field of a struct, by the kind of the field."""
        if kind is None or kind == "exact":
            return value
        if kind in _CHOSEN:
            return Chosen(value)
        if isinstance(value, list):
            found = [self._word(kind, name, each, holder, around) for each in value]
            return found if kind == "offset" else sorted(found, key=_order)
        if value == 0 and holder.get("error_code"):
            return value  # Kafka's default, and no id: the struct only says what is wrong
        match kind:
            case "offset" | "stored-offset" | "produced-offset":
                return value if value < 0 else self._position(kind, value, around)
            case "topic" | "group" | "transactional-id":
                return self._name(kind, value)
            case "topic-id":
                topic = self.topics.name("", value)
                return Chosen(value) if topic == str(value) else topic  # its name is unknown
            case "coordinator":
                group = self._name("group", value)
                return group if group != value else self._name("transactional-id", value)
            case "member":
                group, groups = self._name("group", around.group), self._ids.groups
                there = value if self._is_target else groups.member(group, value)
                return groups.captured.get((group, there), value)
            case "node":
                is_known = value in self._nodes or (not self._nodes and value >= 0)
                return _A_BROKER if is_known else value
            case "producer-id":
                epoch = holder.get(name.removesuffix("_id") + "_epoch", -1)
                return value if value < 0 else self._producer(value, epoch).producer_id
            case "producer-epoch":
                number = holder.get(name.removesuffix("_epoch") + "_id", -1)
                return value if value < 0 or number < 0 else self._producer(number, value).epoch
            case "opaque":
                return self._opaque.get((name, value), Chosen(value))
            case "replicas" if not self._is_target:
                return limited(value, len(self._ids.target.nodes))
            case "resource":
                word = resource_word(holder)
                if word.startswith("broker"):
                    return self._brokers.get(value, value)
                return self._name(word.replace(" ", "-"), value)
            case "protocol" if self._names:
                what = "Assignment" if "assignment" in name else "Subscription"
                return with_topics(value, what, partial(self._name, "topic"))
        return value

    def _position(self, kind: FieldKind, offset: int, around: FieldContext) -> Any:
        """Where an offset is in the captured log. While another request writes, and in logs with
        transaction markers, only whether it is set is compared: `logs` compares it with the
        target's log. A captured offset goes to the target and back, since several captured offsets
        may be one there, as those before the start of the log."""
        log = self.topics.name(around.topic, around.topic_id), around.partition
        offsets = self._ids.offsets.of(log, around.step)
        if kind != "stored-offset" and log in self._ids.marked:
            return Chosen(offset)
        if kind == "produced-offset":
            base = offsets.base_to_capture(offset) if self._is_target else offset
            return Chosen(offset) if base is None else base
        if around.is_racing:
            return Chosen(offset)
        there = offset if self._is_target else offsets.to_target(offset)
        return offsets.to_capture(there)

    def _producer(self, producer_id: int, epoch: int) -> Producer:
        producer = Producer(producer_id, epoch)
        return self._producers.target(producer) or producer


def _order(value: Any) -> tuple[int, str]:
    """Numbers by size, everything else as text."""
    return (value, "") if isinstance(value, int) else (0, told(value))


def _merges(known: Body, tree: Body, key: tuple[tuple[str, ...], ...]) -> bool:
    """Add the elements of a second entry to the first one, where both have nothing but sets beside
    their key: brokers join only neighbouring partitions of a topic in one entry of a Fetch."""
    names = {name for alternatives in key for name in alternatives}
    sets = [name for name in tree if name not in names]
    if not sets or not all(isinstance(tree[name], Keyed) for name in sets):
        return False
    for name in sets:
        for inner, element in tree[name].items():
            known[name].add(inner, element)
    return True


# -- the comparison of two trees ------------------------------------------------------------------

_CODES = ("error_code", "partition_error_code")


# Gives a difference the rule that allows it, by the structs on the way to it.
Allow = Callable[[Difference, tuple[Body, ...]], Difference]


class Place(NamedTuple):
    """A place in both trees. path: without indices. keys: of the elements on the way. holders: the
    structs on the way, of each part of the path, of the captured or else of the answered tree.
    is_secret: by the struct of either tree. common_only: only fields that both have are compared.
    """

    allow: Allow
    common_only: bool
    path: str = ""
    keys: tuple[str, ...] = ()
    holders: tuple[Body, ...] = ()
    is_secret: bool = False

    def field(self, name: str, *holders: Body) -> Place:
        path = f"{self.path}.{name}" if self.path else name
        hidden = any(is_secret(name, each) for each in holders)
        return self._replace(path=path, holders=(*self.holders, holders[0]), is_secret=hidden)

    def element(self, key: str, element: Tree) -> Place:
        """The place of an array's element, whose own fields are the conditions of a rule."""
        holder = element if isinstance(element, dict) else {}
        holders = (*self.holders[:-1], holder)
        return self._replace(path=f"{self.path}[]", keys=(*self.keys, key), holders=holders)

    def found(self, c: Tree, a: Tree, note: str = "") -> Difference:
        values = plain(c), plain(a)
        one = Difference(self.path, self.keys, *values, note=note, is_secret=self.is_secret)
        return self.allow(one, self.holders)


def compare(c: Body, a: Body, allow: Allow, *, common_only: bool = False) -> Iterator[Difference]:
    """The differences of two trees. common_only: of fields that both sides have."""
    yield from _structs(c, a, Place(allow, common_only))


def _structs(c: Body, a: Body, place: Place) -> Iterator[Difference]:
    for name in c:
        if name in a and (name in _CODES or name.endswith("_state")):
            if not _are_equal(c[name], a[name]):
                yield place.field(name, c, a).found(c[name], a[name], _said(c, a))
                return
    for name in (*c, *(a.keys() - c.keys())):
        holders = [each for each in (c, a) if name in each]
        if len(holders) == 2 or not place.common_only:
            yield from _values(c.get(name), a.get(name), place.field(name, *holders))


def _values(c: Tree, a: Tree, place: Place) -> Iterator[Difference]:
    if _are_equal(c, a):
        return
    if isinstance(c, Keyed) and isinstance(a, Keyed):
        yield from _sets(c, a, place)
    elif isinstance(c, dict) and isinstance(a, dict):
        yield from _structs(c, a, place)
    else:
        yield place.found(c, a)


def _sets(c: Keyed, a: Keyed, place: Place) -> Iterator[Difference]:
    found = [
        each
        for key in (*c, *(key for key in a if key not in c))
        for each in _elements(c.get(key, ABSENT), a.get(key, ABSENT), key, place)
    ]
    if (
        found
        and bool(c) != bool(a)
        and all(ABSENT in (each.captured, each.answered) for each in found)
    ):
        found = [place.found([*c], [*a])]
    yield from found


def _elements(c: Tree, a: Tree, key: str, place: Place) -> Iterator[Difference]:
    here = place.element(key, a if c is ABSENT else c)
    if a is ABSENT:
        a = _without(c)
    elif c is ABSENT:
        c = _without(a)
    if c is not ABSENT and a is not ABSENT:
        yield from _values(c, a, here)
    else:
        said = "it is listed twice" if key.endswith(AGAIN) else ""
        yield here.found(c, a, said)


def _are_equal(c: Tree, a: Tree) -> bool:
    if isinstance(c, list) and isinstance(a, list):
        return len(c) == len(a) and all(map(_are_equal, c, a))
    if isinstance(c, Chosen) or isinstance(a, Chosen):
        return is_set(c) == is_set(a)
    return type(c) is type(a) and bool(c == a)


def _without(element: Tree) -> Tree:
    """What an answer says that leaves out an element: that there was no error, and that its sets
    are empty; `ABSENT` if the element says more."""
    if not isinstance(element, dict):
        return ABSENT
    if element.get("error_code"):
        return {**element, "error_code": 0}
    if any(isinstance(value, Keyed) for value in element.values()) and not any(
        name.endswith("error_code") for name in element
    ):
        return {
            name: Keyed() if isinstance(value, Keyed) else value for name, value in element.items()
        }
    return ABSENT


def _said(c: Body, a: Body) -> str:
    """The words of the broker that refused: beside the answered code, or else the captured one."""
    for who, body in (("the target", a), ("the captured broker", c)):
        words = plain(body.get("error_message"))
        if words and words != "NONE":
            return f"{who} says: {words}"
    return ""
