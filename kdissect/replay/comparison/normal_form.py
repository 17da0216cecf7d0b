"""Messages as trees in the vocabulary of the capture, and the differences of two trees.

`Normaliser` turns a captured response, a target's answer and a reference's answer into trees, and
`compare` compares two trees without knowing any id, API or rule: ids have become names and
positions, sets are keyed by the names of their elements, and what the table of fields leaves to the
server is gone.

    struct             dict: field -> tree
    array with keys    Keyed: text of the key -> tree of the element
    array without      list of trees, in order
    value              itself, or `Chosen` (only whether it is set counts)

In a struct whose error code or state differs, the other fields follow from that: only the code or
state is a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kdissect.codec.message import Message
from kdissect.codec.message_codec import UNKNOWN_TAGS
from kdissect.codec.redaction import is_secret
from kdissect.replay.comparison.terms import Chosen, Terms, plain
from kdissect.replay.fields import (
    FieldContext,
    FieldKind,
    FieldRule,
    FieldTable,
    Shape,
    ShapeField,
    about,
    shape_of,
    told,
)
from kdissect.replay.model import ABSENT, Difference, Log, ReplayPlan, Step
from kdissect.replay.translation.id_map import resource_word
from kdissect.replay.workload.messages import api_name, request_of

SURPLUS = "surplus"  # bytes after the end of a message
_CHOSEN = frozenset(
    {
        FieldKind.GENERATION, FieldKind.LEADER_EPOCH, FieldKind.COUNTER, FieldKind.TIME,
        FieldKind.TEXT,
    }
)  # fmt: skip

Tree = Any
Body = dict[str, Any]


class Keyed(dict[str, Tree]):
    """The elements of a set by their keys; an element that is listed twice has `AGAIN` behind."""


AGAIN = " again"


class RequestNames:
    """Topics, groups and transactional ids that the requests of a plan name; others are foreign."""

    def __init__(self, plan: ReplayPlan) -> None:
        sent = [step for step in plan.steps if step.skipped is None]
        self._named = {
            kind: {name for step in sent for name in step.named(word)}
            for kind, word in (
                (FieldKind.TOPIC, "topic"), (FieldKind.GROUP, "group"),
                (FieldKind.TRANSACTIONAL_ID, "txn"),
            )
        }  # fmt: skip

    def is_foreign(self, kind: FieldKind, name: str) -> bool:
        if kind is FieldKind.TOPIC and name.startswith("__"):
            return True  # brokers make these when they need them
        return kind in self._named and name not in self._named[kind]


class Normaliser:
    """Makes trees of one side's messages. keeps_served: with what is the server's own, which only
    another target's answer is compared with."""

    def __init__(
        self,
        table: FieldTable,
        terms: Terms,
        names: RequestNames,
        *,
        keeps_served: bool = False,
    ) -> None:
        self._table, self._terms, self._names = table, terms, names
        self._keeps_served = keeps_served

    def tree(self, step: Step, message: Message) -> Body:
        """The tree of a response to a step's request."""
        shape = shape_of(self._table, message.api_key, "response", message.api_version)
        tree = self._struct(step, shape, message.body, _request_context(step))
        if message.surplus:
            tree[SURPLUS] = message.surplus
        return tree

    def _log(self, around: FieldContext) -> Log:
        """The partition that the structs around a value name, by the capture's name."""
        return self._terms.topics.name(around.topic, around.topic_id), around.partition

    # -- structs and arrays -------------------------------------------------------------------

    def _struct(self, step: Step, shape: Shape, values: Body, around: FieldContext) -> Body:
        if shape.named:
            around = about(shape.named, values, around)
        tree: Body = {}
        for each in shape.fields:
            name, value = each.slot.name, values.get(each.slot.name)
            kind = self._kind(each.rules, step, values)
            if kind is FieldKind.IGNORE or kind is FieldKind.RECORDS:
                continue
            if kind is FieldKind.SERVER:
                if self._keeps_served:
                    tree[name] = value
            elif value is None:
                tree[name] = None if kind not in _CHOSEN else Chosen(None)
            elif each.inner is None:
                tree[name] = self._value(step, name, kind, value, values, around)
            elif each.slot.field.is_array:
                tree[name] = self._array(step, each, each.inner, value, around)
            else:
                tree[name] = self._struct(step, each.inner, value, around)
        if values.get(UNKNOWN_TAGS):
            tree[UNKNOWN_TAGS] = values[UNKNOWN_TAGS]
        return tree

    def _kind(self, rules: tuple[FieldRule, ...], step: Step, values: Body) -> FieldKind | None:
        for rule in rules:
            if not rule.is_conditional or self.applies(rule, step, values):
                return rule.kind
        return None

    def applies(self, rule: FieldRule, step: Step, values: Body) -> bool:
        """Return whether the conditions of a rule hold in a struct."""
        if rule.needs_race and not step.is_racing:
            return False
        if rule.needs_brokers and not self._terms.ids.has_several_brokers:
            return False
        return all(
            name in values and pattern.search(told(values[name])) for name, pattern in rule.where
        )

    def _array(
        self, step: Step, of: ShapeField, inner: Shape, values: list[Body], around: FieldContext
    ) -> Tree:
        if not of.key:
            return [self._struct(step, inner, each, around) for each in values]
        elements = Keyed()
        for each in values:
            if of.elements and self._kind(of.elements, step, each) in (
                FieldKind.IGNORE, FieldKind.SERVER,
            ):  # fmt: skip
                continue
            here = about(inner.named, each, around) if inner.named else around
            key, kind = self._element_key(step, of, inner, each, here)
            if kind is not None and self._names.is_foreign(kind, key):
                continue
            tree = self._struct(step, inner, each, around)
            known = elements.get(key)
            if known is not None and _merges(known, tree, of.key):
                continue
            while key in elements:
                key += AGAIN
            elements[key] = tree
        return elements

    def _element_key(
        self, step: Step, of: ShapeField, inner: Shape, values: Body, around: FieldContext
    ) -> tuple[str, FieldKind | None]:
        """The text of an element's key, and the kind of name that it is, if it is one."""
        parts, named = [], None
        for alternatives in of.key:
            name = next((each for each in alternatives if values.get(each) not in (None, "")), "")
            if not name:
                continue
            value = values[name]
            kind = self._kind(inner.rules_of(name), step, values)
            if kind is FieldKind.IGNORE or kind is FieldKind.SERVER:
                continue
            if kind is FieldKind.TOPIC_ID:
                kind, value = FieldKind.TOPIC, self._terms.topics.name("", value)
            elif kind is FieldKind.TOPIC:
                value = self._terms.topic(value)
            elif name == "api_key":
                value = api_name(value)
            elif name == "resource_type":
                value = resource_word(value, is_acl="principal" in values or "acls" in values)
            elif isinstance(value, list):
                value = ", ".join("=".join(told(one) for one in each.values()) for each in value)
            elif kind is not None:
                value = self._value(step, name, kind, value, values, around)
            named = named or kind
            parts.append(told(value.value if isinstance(value, Chosen) else value))
        return " ".join(parts), named

    # -- values -------------------------------------------------------------------------------

    def _value(
        self,
        step: Step,
        name: str,
        kind: FieldKind | None,
        value: Any,
        holder: Body,
        around: FieldContext,
    ) -> Tree:
        if kind is None or kind is FieldKind.EXACT:
            return value
        if kind in _CHOSEN:
            return Chosen(value)
        if isinstance(value, list):
            found = [self._value(step, name, kind, each, holder, around) for each in value]
            return found if kind is FieldKind.OFFSET else sorted(found, key=_order)
        if value == 0 and holder.get("error_code"):
            return value  # Kafka's default, and no id: the struct only says what is wrong
        if kind in (FieldKind.OFFSET, FieldKind.STORED_OFFSET):
            return self._offset(step, value, around, kind)
        if kind is FieldKind.PRODUCED_OFFSET:
            return self._produced(step, value, around)
        return self._terms.word(kind, name, value, holder, around)

    def _offset(self, step: Step, value: int, around: FieldContext, kind: FieldKind) -> Tree:
        """Where an offset is in the captured log. While another request writes, and next to
        transaction markers, that is no matter: `logs` compares it with the target's log."""
        if value < 0:
            return value
        log = self._log(around)
        is_near_marker = kind is FieldKind.OFFSET and log in self._terms.ids.marked
        if step.is_racing or is_near_marker:
            return Chosen(value)
        return self._terms.offset(log, value)

    def _produced(self, step: Step, value: int, around: FieldContext) -> Tree:
        if value < 0:
            return value
        log = self._log(around)
        found = None if log in self._terms.ids.marked else self._terms.produced(
            step.number, log, value
        )  # fmt: skip
        return Chosen(value) if found is None else found


def _order(value: Tree) -> tuple[int, str]:
    """Numbers by size, everything else as text."""
    return (value, "") if isinstance(value, int) else (0, told(value))


def _request_context(step: Step) -> FieldContext:
    """Group and transactional id that only the request names."""
    request = request_of(step.exchange)
    body = {} if request is None else request.body
    return FieldContext(
        group=body.get("group_id") or "",
        transactional_id=body.get("transactional_id") or "",
    )


def _merges(known: Body, tree: Body, key: tuple[tuple[str, ...], ...]) -> bool:
    """Add the elements of a second entry to the first one, where both have nothing but sets beside
    their key: some brokers split the partitions of a topic over several entries."""
    names = {name for alternatives in key for name in alternatives}
    sets = [name for name in tree if name not in names]
    if not sets or not all(isinstance(tree[name], Keyed) for name in sets):
        return False
    for name in sets:
        for inner, element in tree[name].items():
            while inner in known[name]:
                inner += AGAIN
            known[name][inner] = element
    return True


# -- the comparison of two trees ------------------------------------------------------------------

_CODES = ("error_code", "partition_error_code")


class Place(NamedTuple):
    """A place in both trees. path: without indices. keys: of the elements on the way. holders: the
    structs on the way, of each part of the path, of the captured or else of the answered tree.
    is_secret: by the struct of either tree."""

    path: str = ""
    keys: tuple[str, ...] = ()
    holders: tuple[Body, ...] = ()
    is_secret: bool = False

    def field(self, name: str, *holders: Body) -> Place:
        path = f"{self.path}.{name}" if self.path else name
        hidden = any(is_secret(name, each) for each in holders)
        return Place(path, self.keys, (*self.holders, holders[0]), hidden)

    def element(self, key: str, element: Any) -> Place:
        """The place of an array's element, whose own fields are the conditions of a rule."""
        holder = element if isinstance(element, dict) else {}
        holders = (*self.holders[:-1], holder)
        return Place(f"{self.path}[]", (*self.keys, key), holders, self.is_secret)


class Found(NamedTuple):
    """A difference with the structs on the way to it."""

    difference: Difference
    holders: tuple[Body, ...]


def compare(captured: Tree, answered: Tree, *, common_only: bool = False) -> Iterator[Found]:
    """The differences of two trees. common_only: of fields that both sides have."""
    yield from _Diff(common_only).struct(captured, answered, Place())


class _Diff(NamedTuple):
    common_only: bool

    def struct(self, c: Body, a: Body, place: Place) -> Iterator[Found]:
        for name in c:
            if name in a and (name in _CODES or name.endswith("_state")):
                if not _are_equal(c[name], a[name]):
                    yield _found(place.field(name, c, a), c[name], a[name], _said(c, a))
                    return
        for name, value in c.items():
            if name in a:
                yield from self.value(value, a[name], place.field(name, c, a))
            elif not self.common_only:
                yield from self.value(value, None, place.field(name, c))
        if not self.common_only:
            for name in a.keys() - c.keys():
                yield from self.value(None, a[name], place.field(name, a))

    def value(self, c: Tree, a: Tree, place: Place) -> Iterator[Found]:
        if isinstance(c, Keyed) and isinstance(a, Keyed):
            yield from self._keyed(c, a, place)
        elif isinstance(c, dict) and isinstance(a, dict):
            yield from self.struct(c, a, place)
        elif isinstance(c, list) and isinstance(a, list) and _has_structs(c, a):
            for index in range(max(len(c), len(a))):
                mine = c[index] if index < len(c) else ABSENT
                theirs = a[index] if index < len(a) else ABSENT
                yield from self._element(mine, theirs, str(index), place)
        elif not _are_equal(c, a):
            yield _found(place, c, a)

    def _keyed(self, c: Keyed, a: Keyed, place: Place) -> Iterator[Found]:
        found = [
            each
            for key in (*c, *(key for key in a if key not in c))
            for each in self._element(c.get(key, ABSENT), a.get(key, ABSENT), key, place)
        ]
        if found and bool(c) != bool(a) and all(_is_one_sided(each) for each in found):
            found = [Found(Difference(place.path, place.keys, [*c], [*a]), place.holders)]
        yield from found

    def _element(self, c: Tree, a: Tree, key: str, place: Place) -> Iterator[Found]:
        here = place.element(key, a if c is ABSENT else c)
        if a is ABSENT:
            a = _without(c)
        elif c is ABSENT:
            c = _without(a)
        if c is not ABSENT and a is not ABSENT:
            yield from self.value(c, a, here)
        else:
            said = "it is listed twice" if key.endswith(AGAIN) else ""
            yield Found(Difference(here.path, here.keys, c, a, note=said), here.holders)


def _found(place: Place, c: Tree, a: Tree, said: str = "") -> Found:
    difference = Difference(
        place.path, place.keys, plain(c), plain(a), note=said, is_secret=place.is_secret
    )
    return Found(difference, place.holders)


def _are_equal(c: Tree, a: Tree) -> bool:
    if isinstance(c, list) and isinstance(a, list):
        return len(c) == len(a) and all(map(_are_equal, c, a))
    if isinstance(c, Chosen) or isinstance(a, Chosen):
        return _is_set(c) == _is_set(a)
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


def _is_one_sided(found: Found) -> bool:
    one = found.difference
    return one.captured is ABSENT or one.answered is ABSENT


def _has_structs(*arrays: list[Tree]) -> bool:
    return any(isinstance(each, dict) for array in arrays for each in array)


def _is_set(value: Tree) -> bool:
    return value.is_set if isinstance(value, Chosen) else Chosen(value).is_set


def _said(c: Body, a: Body) -> str:
    """The words of the broker that refused: beside the answered code, or else the captured one."""
    for who, body in (("the target", a), ("the captured broker", c)):
        words = plain(body.get("error_message"))
        if words and words != "NONE":
            return f"{who} says: {words}"
    return ""
