"""What can be known of a request before the run, so that sending it takes no decoding.

Most requests of a large workload are alike and small: nothing in them needs a translation, or only
the topic ids and producers of a Produce, which have their size and place. Their captured bytes are
sent with just these changed. `adapt` stays the definition; the tests compare both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kdissect.replay import messages as api
from kdissect.replay.batches import BatchHeader, headers, is_sealed, patch_producer
from kdissect.replay.messages import entries, request_of
from kdissect.replay.model import Exchange
from kdissect.replay.offsets import Log
from kdissect.replay.producers import NOBODY, Producer
from kdissect.replay.state import State
from kdissect.replay.target_facts import ZERO_UUID
from kdissect.replay.walk import Kind, Spot, spots

# APIs that have no translation of their own in `adapt` (Metadata and FindCoordinator: see below).
_PLAIN = frozenset(
    {
        api.PRODUCE_API, api.LIST_OFFSETS, api.METADATA, api.OFFSET_COMMIT, api.OFFSET_FETCH,
        api.FIND_COORDINATOR, api.JOIN_GROUP, api.HEARTBEAT, api.LEAVE_GROUP, api.DESCRIBE_GROUPS,
        api.LIST_GROUPS, api.API_VERSIONS, api.INIT_PRODUCER_ID, api.DESCRIBE_CLUSTER,
    }
)  # fmt: skip
_NAMES = frozenset({Kind.TOPIC, Kind.GROUP, Kind.TRANSACTIONAL_ID, Kind.PARTITION})
_GROUP_OR_TRANSACTION = (0, 1)  # key types of FindCoordinator


@dataclass(slots=True)
class Shortcut:
    """needs: the capture's names of topics that the request is about, where leaders matter.

    is_plain: nothing in it is translated, whatever is learnt. topic_ids: (place in the frame, id);
    batches: (log, header with its place in the frame, was its CRC right): with `is_patched` these
    are all that is translated.
    """

    needs: tuple[str, ...] = ()
    is_plain: bool = False
    is_patched: bool = False
    topic_ids: tuple[tuple[int, UUID], ...] = ()
    batches: tuple[tuple[Log, BatchHeader, bool], ...] = ()


def shortcut(t: State, exchange: Exchange, needs_topics: bool) -> Shortcut:
    """What can be known of a request."""
    request = request_of(exchange)
    if request is None:
        return Shortcut()
    found = list(spots(request))
    made = Shortcut(_needs(t, found) if needs_topics else ())
    if exchange.api_key not in _PLAIN or t.has_renames or t.options.reencode:
        return made
    body = request.body
    if exchange.api_key == api.METADATA and body["topics"] and not t.may_create:
        return made
    if exchange.api_key == api.FIND_COORDINATOR:
        if body.get("key_type", 0) not in _GROUP_OR_TRANSACTION:
            return made
    if not any(_is_translated(spot) for spot in found):
        made.is_plain = True
    elif exchange.api_key == api.PRODUCE_API:
        _patches(t, made, exchange, body)
    return made


def _needs(t: State, found: list[Spot]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for kind, slot, holder, around in found:
        value = holder[slot.name]
        if kind is Kind.TOPIC:
            names.update(dict.fromkeys(value if isinstance(value, list) else [value]))
        elif kind is Kind.TOPIC_ID and not around.topic:
            for each in value if isinstance(value, list) else [value]:
                if each in t.names:
                    names[t.names[each]] = None
    return tuple(names)


def _is_translated(spot: Spot) -> bool:
    """Whether a value may be another at the target."""
    if spot.kind in _NAMES:
        return False
    value = spot.holder[spot.slot.name]
    for each in value if isinstance(value, list) else [value]:
        if spot.kind is Kind.TOPIC_ID:
            if each != ZERO_UUID:
                return True
        elif spot.kind is Kind.MEMBER:
            if each:
                return True
        elif spot.kind is Kind.RECORDS:
            if any(header.producer_id >= 0 for header in headers(each)):
                return True
        elif each >= 0:
            return True
    return False


def _patches(t: State, made: Shortcut, exchange: Exchange, body: dict[str, Any]) -> None:
    """The places of topic ids and batches in a Produce; in wire order, so none is another's."""
    frame = exchange.request or b""
    at = 0
    topic_ids: list[tuple[int, UUID]] = []
    batches: list[tuple[Log, BatchHeader, bool]] = []
    for topic in entries(body["topic_data"]):
        topic_id = topic.get("topic_id")
        if topic_id is not None:
            at = frame.find(topic_id.bytes, at)
            if at < 0:
                return
            topic_ids.append((at, topic_id))
            at += 16
        name = t.topic_name(topic.get("name") or "", topic_id)
        for partition in entries(topic["partition_data"]):
            data = partition["records"] or b""
            at = frame.find(data, at)
            if at < 0:
                return
            for header in headers(data):
                if header.magic == 2 and header.producer_id >= 0 and not header.is_partial:
                    moved = header._replace(pos=at + header.pos)
                    batches.append(((name, partition["index"]), moved, is_sealed(data, header)))
            at += len(data)
    made.is_patched = True
    made.topic_ids, made.batches = tuple(topic_ids), tuple(batches)


def patched(t: State, made: Shortcut, frame: bytes, correlation_id: int) -> bytes | None:
    """The frame with the target's ids; None where one is not known (`adapt` says what then)."""
    out = bytearray(frame)
    out[4:8] = correlation_id.to_bytes(4, "big", signed=True)
    for at, captured_id in made.topic_ids:
        target_id = t.topic_id(captured_id)
        if target_id is None:
            return None
        out[at : at + 16] = target_id.bytes
    for log, header, was_sealed in made.batches:
        captured = Producer(header.producer_id, header.producer_epoch)
        found = t.producers.target(captured)
        sequence = header.base_sequence
        if found is None:
            if header.is_transactional:
                return None
            found, sequence = NOBODY, -1
        else:
            sequence = t.producers.sequence(captured, log, sequence)
        if (*found, sequence) != (*captured, header.base_sequence):
            patch_producer(out, header, *found, sequence, seal=was_sealed)
    return bytes(out)
