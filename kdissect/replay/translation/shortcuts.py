"""Requests and answers of a form that is known: translated and learnt from without being decoded.

Most messages of a large workload are small and alike (`codec.message_forms`). What `requests` would
change in a request lies at places that its form tells, and has its size; so the captured bytes are
sent with just these patched. What `answers` asks of an answer are a few values beside those of the
captured response, and where both are of one form, they lie at the same places.

`requests` and `answers` stay the definition: whatever is not met here gives None, and they are
asked; what is changed is what `requests` says for that kind of field. The tests compare both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from kdissect.codec.message_codec import Slot
from kdissect.codec.message_forms import FORMS_MAX, Form, FormLeaf, form_of
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import last_data
from kdissect.replay.model import READ, Step
from kdissect.replay.translation import requests
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.readings import Place, Reading, reading_of
from kdissect.replay.workload.field_kinds import FieldKind, Spot
from kdissect.replay.workload.messages import OUT_OF_SEQUENCE, SESSION_LOST, TRANSIENT

_NAMES = frozenset(
    {FieldKind.TOPIC, FieldKind.GROUP, FieldKind.TRANSACTIONAL_ID}
)  # the same without renames
_CHANGING = frozenset(requests.CHANGES) - _NAMES
_BESIDE = frozenset({FieldKind.GENERATION, FieldKind.PRODUCER_ID})  # need the struct around
_GROUP_OR_TRANSACTION = (0, 1)  # key types of FindCoordinator

_Special = Callable[[IdMap, Step, Reading, bytes, list[Any], bytearray], bool]


# -- requests -----------------------------------------------------------------------------------


class _Change(NamedTuple):
    """A place with what `requests` does to it. around: index of what the structs around it say;
    place: where the struct around is needed, too."""

    change: Callable[[IdMap, Step, Spot, Any], Any]
    kind: FieldKind
    slot: Slot
    leaves: tuple[FormLeaf, ...]
    around: int
    place: Place | None


class _Patch:
    """What may be another at the target in requests of a form.

    changes: in the order in which `requests` does them; arounds: what structs around them say, each
    once. special: the API's own, None where it does nothing; `is_known` False: only `requests`
    knows.
    """

    __slots__ = ("arounds", "changes", "is_known", "is_plain", "reading", "special")

    def __init__(self, form: Form) -> None:
        self.reading = reading_of(form)
        self.is_known, self.special = _special(self.reading)
        places = [place for place in self.reading.of(_CHANGING) if place.leaves]
        places.sort(key=lambda place: place.kind is not FieldKind.GENERATION)
        firsts: dict[Any, Place] = {}
        for place in places:
            firsts.setdefault(place.around, place)
        self.arounds = tuple(firsts.values())
        order = {around: index for index, around in enumerate(firsts)}
        self.changes = tuple(
            _Change(
                requests.CHANGES[place.kind], place.kind, place.slot, place.leaves,
                order[place.around], place if place.kind in _BESIDE else None,
            )
            for place in places
        )  # fmt: skip
        self.is_plain = self.is_known and self.special is None and not self.changes


_patch_of = lru_cache(FORMS_MAX)(_Patch)


def patched(t: IdMap, step: Step, frame: bytes, correlation_id: int) -> bytes | None:
    """The frame with the target's ids; None where `requests` has to be asked. Raises Untranslatable
    as it does."""
    exchange = step.exchange
    form = form_of(frame, "request", exchange.api_key, exchange.api_version)
    if form is None or t.has_renames or t.options.reencode:
        return None
    patch = _patch_of(form)
    if not patch.is_known:
        return None
    out = bytearray(frame)
    out[4:8] = correlation_id.to_bytes(4, "big", signed=True)
    if patch.is_plain:
        return bytes(out)
    values = form.values(frame)
    if patch.special is not None:
        if not patch.special(t, step, patch.reading, frame, values, out):
            return None
    arounds = [place.around_of(values) for place in patch.arounds]
    for change, kind, slot, leaves, around, place in patch.changes:
        if place is None:
            spot = Spot(kind, slot, _NOTHING, arounds[around])
        else:
            spot = place.spot(values)
            if kind is FieldKind.PRODUCER_ID and requests.producer_epoch(t, spot):
                name = requests.epoch_name(spot)
                leaf = place.holder[name]
                if not isinstance(leaf, FormLeaf) or not _put(out, leaf, spot.holder[name]):
                    return None
        for leaf in leaves:
            value = values[leaf.place]
            found = change(t, step, spot, value)
            if found != value and not _put(out, leaf, found):
                return None
    return bytes(out)


_NOTHING: dict[str, Any] = {}


def _put(out: bytearray, leaf: FormLeaf, value: Any) -> bool:
    """Write a value where another was; False where it has not its size."""
    if isinstance(value, UUID):
        value = value.bytes
    elif isinstance(value, str):
        try:
            value = value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return False
    if isinstance(value, bytes):
        if len(value) != leaf.size:
            return False
        out[leaf.pos : leaf.pos + leaf.size] = value
        return True
    try:
        struct.pack_into(f">{leaf.code}", out, leaf.pos, value)
    except struct.error:
        return False
    return True


def _special(reading: Reading) -> tuple[bool, _Special | None]:
    """Whether the API's own translation is known here, and what does it, None: it does nothing."""
    key, body = reading.form.api_key, reading.body
    if key not in requests.SPECIAL:
        return True, None
    if key == ApiKey.FETCH:
        return True, (_session if "session_id" in body else None)
    if key == ApiKey.METADATA:
        return True, (_metadata if body["topics"] else None)
    if key == ApiKey.FIND_COORDINATOR:
        return True, _find_coordinator
    if key == ApiKey.JOIN_GROUP:
        return True, None  # it renames
    if key == ApiKey.CONSUMER_GROUP_HEARTBEAT:
        return body["topic_partitions"] is None, None
    return False, None


def _session(
    t: IdMap, step: Step, reading: Reading, frame: bytes, values: list[Any], out: bytearray
) -> bool:
    """The Fetch session, where the target goes on with it."""
    if len(t.target.nodes) > 1:
        return False  # which of them has it
    session, epoch = reading.body["session_id"], reading.body["session_epoch"]
    found = t.sessions.continued(
        t.broker(step), step.number, values[session.place], values[epoch.place],
        _captured_code(t, step), lambda: reading.form.message(frame).body,
    )  # fmt: skip
    return found is not None and _put(out, session, found[0]) and _put(out, epoch, found[1])


def _captured_code(t: IdMap, step: Step) -> int:
    """The error of a captured response as a whole."""
    exchange = step.exchange
    response = exchange.response
    if response is None:
        return 0
    form = form_of(response, "response", exchange.api_key, exchange.api_version)
    if form is not None:
        leaf = reading_of(form).body.get("error_code")
        return 0 if leaf is None else form.value(response, leaf)
    captured = t.captured_of(step)
    return 0 if captured is None else int(captured.body.get("error_code", 0))


def _metadata(
    t: IdMap, step: Step, reading: Reading, frame: bytes, values: list[Any], out: bytearray
) -> bool:
    leaf = reading.body.get("allow_auto_topic_creation")
    if t.may_create:
        return True
    return isinstance(leaf, FormLeaf) and _put(out, leaf, False)


def _find_coordinator(
    t: IdMap, step: Step, reading: Reading, frame: bytes, values: list[Any], out: bytearray
) -> bool:
    leaf = reading.body.get("key_type")
    return leaf is None or values[leaf.place] in _GROUP_OR_TRANSACTION


# -- answers ------------------------------------------------------------------------------------


class Pair:
    """A captured response and an answer of one form. codes: of the answer, `was` of the other."""

    __slots__ = ("answered", "captured", "codes", "reading", "was")

    def __init__(self, reading: Reading, captured: list[Any], answered: list[Any]) -> None:
        self.reading, self.captured, self.answered = reading, captured, answered
        self.codes = {answered[leaf.place] for leaf in reading.codes}
        self.was = {captured[leaf.place] for leaf in reading.codes}


def pair_of(t: IdMap, step: Step, answer: bytes) -> Pair | None:
    """Both responses of a step; None where they are not of one form."""
    exchange = step.exchange
    captured = exchange.response
    if captured is None or len(captured) != len(answer) or t.options.reencode:
        return None
    key, version = exchange.api_key, exchange.api_version
    form = form_of(captured, "response", key, version)
    if form is None or not form.fits(int.from_bytes(answer)):
        return None
    return Pair(reading_of(form), form.values(captured), form.values(answer))


def is_final(t: IdMap, step: Step, pair: Pair) -> bool:
    """Whether `answers.retry` would certainly take the answer as it is."""
    if pair.codes & TRANSIENT and pair.codes & (TRANSIENT - pair.was):
        return False
    if OUT_OF_SEQUENCE in pair.codes or step.exchange.api_key == ApiKey.SHARE_FETCH:
        return False
    if step.exchange.api_key != ApiKey.FETCH:
        return step.step_class != READ
    if pair.codes & SESSION_LOST:
        return False
    return any(pair.codes) or _brings_all(t, pair)


def _brings_all(t: IdMap, pair: Pair) -> bool:
    """Whether each partition of a Fetch that had data records has them, in the same order."""
    for place in pair.reading.records:
        for leaf in place.leaves:
            captured, answered = pair.captured[leaf.place], pair.answered[leaf.place]
            last = last_data(captured)
            if last < 0:
                continue
            mine, theirs = place.around_of(pair.captured), place.around_of(pair.answered)
            if mine.partition != theirs.partition or not _is_same_topic(t, mine, theirs):
                return False
            log = (t.topic_name(mine.topic, mine.topic_id), mine.partition)
            if not t.reaches(log, last, last if captured == answered else last_data(answered)):
                return False
    return True


def _is_same_topic(t: IdMap, mine: Any, theirs: Any) -> bool:
    if mine.topic or mine.topic_id is None:
        return bool(t.topic(mine.topic) == theirs.topic)
    found = t.topic_id(mine.topic_id)
    return found is theirs.topic_id or found == theirs.topic_id


def learnt(t: IdMap, step: Step, pair: Pair) -> bool:
    """Learn from a final answer; False where `answers` has to."""
    key = step.exchange.api_key
    if key == ApiKey.PRODUCE:
        return _produced(t, step, pair)
    if key == ApiKey.FETCH:
        return _fetched(t, step, pair)
    return False


def _fetched(t: IdMap, step: Step, pair: Pair) -> bool:
    session, code = pair.reading.body.get("session_id"), pair.reading.body.get("error_code")
    if not isinstance(session, FormLeaf) or not isinstance(code, FormLeaf):
        return False
    answer = {
        "session_id": pair.answered[session.place],
        "error_code": pair.answered[code.place],
    }
    captured_id = pair.captured[session.place]
    t.sessions.answered(t.broker(step), step.number, captured_id, answer, is_final=True)
    return True


def _produced(t: IdMap, step: Step, pair: Pair) -> bool:
    """Where batches are that both brokers took, all of them."""
    if any(pair.codes) or any(pair.was):
        return False
    found = []
    for place in pair.reading.base_offsets:
        mine, theirs = place.around_of(pair.captured), place.around_of(pair.answered)
        if mine.partition != theirs.partition or not _is_same_topic(t, mine, theirs):
            return False
        (base,) = place.leaves
        start = place.holder.get("log_start_offset")
        log = (t.topic_name(mine.topic, mine.topic_id), mine.partition)
        first = pair.answered[start.place] if isinstance(start, FormLeaf) else -1
        found.append((log, pair.captured[base.place], pair.answered[base.place], first))
    if len({log for log, _, _, _ in found}) < len(found):
        return False
    for log, captured, answered, start in found:
        expected = t.offsets.expect(log, captured)
        if expected is not None:
            t.expected[step.number, log] = expected
        t.offsets.produced(log, captured, answered)
        t.offsets.target_starts(log, start)
    return True
