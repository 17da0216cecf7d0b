"""Compares two trees of `normal_form`. It knows no ids, no API and no rules.

In a struct whose error code or state differs, the other fields follow from that: only the code or
state is a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kdissect.codec.redaction import is_secret
from kdissect.replay.comparison.normal_form import AGAIN, Chosen, Keyed, Tree, plain
from kdissect.replay.comparison.terms import Position
from kdissect.replay.model import ABSENT, Difference

Body = dict[str, Any]

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
    mine, theirs = (each.position if isinstance(each, Position) else each for each in (c, a))
    return type(mine) is type(theirs) and bool(mine == theirs)


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
