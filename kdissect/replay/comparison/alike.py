"""Answers of the form of the captured response, compared value by value without being decoded.

Theory of operation
-------------------
Where a captured response and an answer are of one form (`wire.forms`), both have every field at the
same place, every list has as many elements, and what is null here is null there. Then the walk of
`compare` has little to decide: which leaves differ is seen at once, and each of them is handed to
the rules as the walk would, with its path and the plain fields of the struct around it. What the
walk knows beyond that is found once for a form and a set of rules, in a `_View`.

It is left to the walk where it would not take the elements of a list in their order (the keys of
both sides, in the target's terms, are compared first), where a rule is about a whole list or
struct, where an error code or a state differs (other fields follow from these), and where a rule
looks at more than plain fields. So `compare` stays the definition; the tests compare both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kdissect.codec.message_codec import Layout, Slot, layout
from kdissect.codec.message_forms import Form, FormLeaf, Ref
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.comparator import (
    Comparator,
    DiffPosition,
    TreeDiff,
    keys_of,
    shape_of,
    verdict_of,
)
from kdissect.replay.comparison.rules import Rule, Rules
from kdissect.replay.model import Judgement, Outcome, Step, Verdict
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.shortcuts import Pair, pair_of
from kdissect.replay.workload.field_kinds import Around, FieldKind, about

_WALK_ONLY = frozenset({"resource_name", "key"})  # keys that need more than their value
_AS_IT_IS = frozenset({None, FieldKind.PARTITION})
_OF_GROUPS = frozenset(
    {FieldKind.MEMBER, FieldKind.GENERATION}
)  # values that mean nothing without a group
_GROUP: Any = object()  # stands for what only the request may tell


class QuickComparator(Comparator):
    """Judges as `Comparator` does."""

    def __init__(self, translator: IdMap, rules: Rules | None = None, strict: bool = False) -> None:
        super().__init__(translator, rules, strict)
        self._views: dict[Form, _View] = {}
        translator.differs_alike = self.differs_alike

    def judge(self, outcome: Outcome) -> Judgement:
        found = self._judge_alike(outcome)
        return super().judge(outcome) if found is None else found

    def differs_alike(self, step: Step, pair: Pair) -> bool | None:
        """`differs`, where a pair tells it: None where it does not."""
        walk = TreeDiff(self, step)
        if not self._compare(walk, pair):
            return None
        return verdict_of(walk.differences) is Verdict.DIFFERENT

    def _judge_alike(self, outcome: Outcome) -> Judgement | None:
        step, answer = outcome.step, outcome.answer
        exchange = step.exchange
        captured = exchange.response
        if (
            answer is None
            or captured is None
            or len(answer) != len(captured)
            or outcome.skipped is not None
            or step.skipped is not None
            or outcome.error
            or not step.expects_response
            or outcome.api_version not in (-1, exchange.api_version)
        ):
            return None
        if exchange.api_key != ApiKey.FETCH and answer[4:] == captured[4:]:
            return None
        pair = pair_of(self.translator, step, answer)
        if pair is None:
            return None
        walk = TreeDiff(self, step)
        if not self._compare(walk, pair):
            return None
        if walk.has_other_records:
            form = pair.reading.form
            self.keep(step, form.message(captured), form.message(answer))
        return Judgement(verdict_of(walk.differences), walk.differences)

    def _compare(self, walk: TreeDiff, pair: Pair) -> bool:
        """Put the differences into the walk; False where the walk has to find them."""
        form = pair.reading.form
        view = self._views.get(form)
        if view is None:
            view = self._views[form] = _View(form, walk.api_name, self.rules)
        return view.compare(self, walk, pair.captured, pair.answered)


class _LeafLine(NamedTuple):
    """A leaf of the body. holder: the plain fields of its struct; order: of the walk.

    is_walks: a difference there is the walk's. element_of: the list that it is an element of.
    """

    leaf: FormLeaf
    kind: FieldKind | None
    path: str
    plain: str
    holder: dict[str, Any]
    around: tuple[Any, ...]
    order: int
    is_walks: bool
    element_of: tuple[FormLeaf, ...]


# leaf, kind, name, plain fields beside it, what is said around it
_Key = tuple[FormLeaf, FieldKind | None, str, dict[str, Any], tuple[Any, ...]]


class _List(NamedTuple):
    """A list of structs whose order means nothing, or one that is the walk's where it differs.

    [first, end): places of the leaves in it. keys: of all elements.
    """

    first: int
    end: int
    is_walks: bool
    keys: tuple[_Key, ...]


class _View:
    """What the walk would do with messages of a form."""

    def __init__(self, form: Form, api_name: str, rules: Rules) -> None:
        self._api_key, self._api_name, self._rules = form.api_key, api_name, rules
        self._is_fetch = form.api_key == ApiKey.FETCH
        self.is_known = form.api_key != ApiKey.SHARE_FETCH
        self.lines: dict[int, _LeafLine] = {}
        self.lists: list[_List] = []
        self.records: list[_LeafLine] = []
        self.topics: list[FormLeaf] = []  # of a Fetch
        self._arounds: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._places: list[int] = []  # of lines, in the order of the walk
        definition = catalog.api(form.api_key).response
        self._struct(layout(definition, form.api_version), form.body, "", "", Around(group=_GROUP))
        self.first = min(self.lines, default=len(form.leaves))
        self._is_in_order = self._places == sorted(self._places)

    # -- made once ------------------------------------------------------------------------------

    def _struct(
        self, of: Layout, values: dict[str, Any], path: str, plain: str, around: Around
    ) -> None:
        shape = shape_of(self._api_key, of)
        around = about(shape.named, values, around)
        holder = {
            name: _plain(value)
            for name, value in values.items()
            if not isinstance(value, (list, dict))
        }
        dot = "." if path else ""
        for name, slot in of.by_name.items():
            value = values[name]
            here, plain_here = f"{path}{dot}{name}", f"{plain}{dot}{name}"
            kind = shape.kinds[name]
            if isinstance(value, Ref):
                is_walks = name in shape.telling or self._looks_around(plain_here, values, holder)
                self._line(value.leaf, kind, here, plain_here, holder, around, is_walks, ())
            elif isinstance(value, list):
                self._array(slot, kind, value, here, plain_here, holder, around)
            elif isinstance(value, dict) and slot.inner is not None:
                first = len(self._places)
                self._struct(slot.inner, value, here, plain_here, around)
                self._note(plain_here, self._places[first:], False, ())

    def _line(
        self, leaf: FormLeaf, kind: FieldKind | None, path: str, plain: str, holder: dict[str, Any],
        around: Around, is_walks: bool, element_of: tuple[FormLeaf, ...],
    ) -> None:  # fmt: skip
        said = self._said(around, kind)
        order = len(self.lines)
        line = _LeafLine(leaf, kind, path, plain, holder, said, order, is_walks, element_of)
        if kind is FieldKind.RECORDS:
            if self._is_fetch:
                self.records.append(line)
            else:
                line = line._replace(is_walks=True)
        self.lines[leaf.place] = line
        self._places.append(leaf.place)

    def _array(
        self, slot: Slot, kind: FieldKind | None, values: list[Any], path: str, plain: str,
        holder: dict[str, Any], around: Around,
    ) -> None:  # fmt: skip
        first = len(self._places)
        rule = self._unordered(plain)
        if slot.inner is None:
            leaves = tuple(value.leaf for value in values if isinstance(value, Ref))
            is_whole = len(leaves) == len(values)  # none is empty
            for leaf in leaves:
                self._line(leaf, kind, path, plain, holder, around, not is_whole, leaves)
            self._note(plain, self._places[first:], False, ())
            return
        names = [] if rule is None else keys_of(rule, slot.inner)
        is_walks = rule is not None and not rule.key
        keys: list[_Key] = []
        for index, each in enumerate(values):
            self._struct(slot.inner, each, f"{path}[{index}]", f"{plain}[]", around)
            found = list(self._keys(slot.inner, names, each, around))
            is_walks |= None in found
            keys += [key for key in found if key is not None]
        self._note(plain, self._places[first:], is_walks, tuple(keys))
        if self._is_fetch and plain == "responses":
            for each in values:
                told = each.get("topic") or each.get("topic_id")
                if isinstance(told, Ref):
                    self.topics.append(told.leaf)
                else:
                    self.is_known = False

    def _keys(
        self, of: Layout, names: list[str], element: dict[str, Any], around: Around
    ) -> Iterator[_Key | None]:
        """The leaves that are an element's key; None where the walk has to look."""
        shape = shape_of(self._api_key, of)
        around = about(shape.named, element, around)
        for name in names:
            for each in name.split("|"):
                value = element.get(each)
                if isinstance(value, Ref):
                    kind = shape.kinds.get(each)
                    holder = {"member_id": _plain(element.get("member_id"))}
                    said = self._said(around, kind)
                    yield None if each in _WALK_ONLY else (value.leaf, kind, each, holder, said)
                    break
                if value not in (None, ""):
                    yield None
                    break

    def _note(self, plain: str, places: list[int], is_walks: bool, keys: tuple[Any, ...]) -> None:
        """A list or struct with leaves at these places, as far as it is to be looked at."""
        is_walks |= any(rule.kind == "ignore" for rule in self._rules.at(self._api_name, plain))
        if places and (is_walks or keys):
            self.lists.append(_List(min(places), max(places) + 1, is_walks, keys))

    def _said(self, around: Around, kind: FieldKind | None) -> tuple[Any, ...]:
        """One object for equal ones."""
        said = _around(around, kind)
        return self._arounds.setdefault(said, said)

    def _unordered(self, plain: str) -> Rule | None:
        for rule in self._rules.at(self._api_name, plain):
            if rule.kind == "unordered":
                return rule
        return None

    def _looks_around(self, plain: str, values: dict[str, Any], holder: dict[str, Any]) -> bool:
        """Whether a rule for a leaf looks at fields beside it that are not plain."""
        return any(
            name in values and name not in holder
            for rule in self._rules.at(self._api_name, plain)
            for name, _ in rule.where
        )

    # -- for each answer ------------------------------------------------------------------------

    def compare(
        self, owner: Comparator, walk: TreeDiff, captured: list[Any], answered: list[Any]
    ) -> bool:
        """See `QuickComparator._compare`."""
        if not self.is_known:
            return False
        first = self.first
        different = [
            place for place in range(first, len(captured)) if captured[place] != answered[place]
        ]
        lines, values = self.lines, _Values(walk, captured, answered)
        for place in different:
            if lines[place].is_walks:
                return False
        for each in self.lists:
            if self._is_fetch or any(each.first <= place < each.end for place in different):
                if each.is_walks or not _are_same(owner, each, values):
                    return False
        if self._is_fetch and not self._are_topics_once(captured, answered):
            return False
        found = []
        for place in different:
            line = lines[place]
            if line.element_of:
                if not _is_same_list(owner, line, values):
                    return False
            elif line.kind is not FieldKind.RECORDS:
                found.append(line)
        found += self.records
        if self.records or not self._is_in_order:
            found.sort(key=lambda line: line.order)
        for line in found:
            mine, theirs = values.holders(line.holder)
            around = values.around(line.around)
            where = DiffPosition(line.path, line.plain, around, mine, theirs, None)
            c, a = captured[line.leaf.place], answered[line.leaf.place]
            if line.kind is FieldKind.RECORDS:
                walk.records(c, a, where)
            else:
                walk.leaf(where, c, a, line.kind, line.leaf.slot)
        return True

    def _are_topics_once(self, captured: list[Any], answered: list[Any]) -> bool:
        count = len(self.topics)
        return count < 2 or (
            len({captured[leaf.place] for leaf in self.topics}) == count
            and len({answered[leaf.place] for leaf in self.topics}) == count
        )


def _plain(value: Any) -> Any:
    return value.leaf if isinstance(value, Ref) else value


def _filled(holder: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    return {name: values[it.place] if type(it) is FormLeaf else it for name, it in holder.items()}


class _Values:
    """The values of both sides, and what structs say with them, each struct once."""

    __slots__ = ("_around", "_filled", "answered", "captured", "walk")

    def __init__(self, walk: TreeDiff, captured: list[Any], answered: list[Any]) -> None:
        self.walk, self.captured, self.answered = walk, captured, answered
        self._around: tuple[Any, Around] = (None, Around())
        self._filled: tuple[Any, dict[str, Any], dict[str, Any]] = (None, {}, {})

    def around(self, around: tuple[Any, ...]) -> Around:
        if self._around[0] is not around:
            captured = self.captured
            said = [captured[it.place] if type(it) is FormLeaf else it for it in around]
            if _GROUP in said:
                said[said.index(_GROUP)] = self.walk.request_around().group
            self._around = around, Around(*said)
        return self._around[1]

    def holders(self, holder: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The captured struct's plain fields, and the answered one's."""
        if self._filled[0] is not holder:
            self._filled = (
                holder, _filled(holder, self.captured), _filled(holder, self.answered)
            )  # fmt: skip
        return self._filled[1:]


def _around(around: Around, kind: FieldKind | None) -> tuple[Any, ...]:
    """With leaves; without the request's group where that does not matter."""
    said: list[Any] = [_plain(it) for it in around]
    if kind not in _OF_GROUPS:
        said = ["" if it is _GROUP else it for it in said]
    return tuple(said)


def _are_same(owner: Comparator, each: _List, values: _Values) -> bool:
    """Whether the elements of both sides are about the same things, one by one."""
    captured, answered = values.captured, values.answered
    for leaf, kind, name, holder, around in each.keys:
        value = captured[leaf.place]
        if kind not in _AS_IT_IS:
            value = owner.meaning.key(
                kind, value, _filled(holder, captured), values.around(around), name
            )
        if value != answered[leaf.place]:
            return False
    return True


def _is_same_list(owner: Comparator, line: _LeafLine, values: _Values) -> bool:
    """Whether the plain values of a list are the captured ones in the target's terms."""
    around, holder = values.around(line.around), values.holders(line.holder)[0]
    return all(
        owner.meaning.key(line.kind, values.captured[leaf.place], holder, around, "")
        == values.answered[leaf.place]
        for leaf in line.element_of
    )
