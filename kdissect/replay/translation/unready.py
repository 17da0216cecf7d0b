"""Finds what an answer says is not ready at the target, so that the request is sent again.

That is an error code after which clients repeat a request (`TRANSIENT`), unless the
capture has it as well; or records of the captured response, or the assignment of a member, that are
not there yet. It is never another difference from the captured response.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.batch_headers import headers, last_data
from kdissect.replay.model import Resource, Step
from kdissect.replay.translation import answers
from kdissect.replay.translation.groups import assignment_in, is_assigned
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import (
    MEMBER_HEARTBEATS,
    NO_TOPIC,
    SHARE_APIS,
    Body,
    bodies,
    error_codes,
    errors,
    is_transient,
    member_of,
    partitions,
)

_INITIALISING = frozenset({ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.INVALID_RECORD_STATE})


class Place(NamedTuple):
    """A partition, topic, group or transaction of a request that is not ready, as the answer names
    it. owners: groups and transactions of a request whose answer names none. what: "" an error
    code, else what it lacks."""

    owners: tuple[Resource, ...] = ()
    topic: Any = None
    partition: int = -1
    what: str = ""


def unready(ids: IdMap, step: Step, answer: Body) -> dict[Place, str]:
    """Places that are not ready -> the reason to send the request again."""
    asked, captured = bodies(step.exchange)
    if not captured:
        return {}
    api_key = step.exchange.api_key
    codes = error_codes(answer)
    if any(codes):
        known = {0, *error_codes(captured)}
        found = {
            place: f"error {code}: not ready yet"
            for place, code in _errors(step, answer)
            if code not in known and _is_transient(ids, step, place, code)
        }
        is_partly_done = api_key == ApiKey.PRODUCE and len(found) < len(codes)
        if is_partly_done and not _is_idempotent(asked):
            return {}  # some partitions were written, and would be so twice
        if found:
            return found
    if api_key == ApiKey.FETCH:
        return _without_records(ids, captured, answer)
    if api_key == ApiKey.SHARE_FETCH:
        return _without_share_records(ids, step, asked, captured, answer)
    if api_key in MEMBER_HEARTBEATS:
        return _without_assignment(ids, step, captured, answer)
    return {}


def _errors(step: Step, answer: Body) -> Iterator[tuple[Place, int]]:
    """Each error code of an answer with the place that has it."""
    owners = tuple(
        resource for resource, _ in step.accesses if resource[0] in ("group", "txn")
    ) or ((step.api_name,),)
    for around, _, code in errors(answer):
        place = Place(owners)
        for holder in around:
            topic = holder.get("name") or holder.get("topic") or holder.get("topic_id")
            if topic is not None:
                place = Place((), topic)
            group = holder.get("group_id") or holder.get("transactional_id")
            if group is not None:
                place = Place(((group,),))
            for name in ("partition_index", "index", "partition"):
                place = place._replace(partition=holder.get(name, place.partition))
        yield place, code


def _is_transient(ids: IdMap, step: Step, place: Place, code: int) -> bool:
    api_key = step.exchange.api_key
    if api_key in SHARE_APIS and code in _INITIALISING:
        # the state of a share partition is read from its coordinator at first (KIP-932)
        return (place.topic, place.partition) not in ids.share.ready
    if not is_transient(api_key, code):
        return False
    return code not in NO_TOPIC or _is_expected(ids, place)


def _is_expected(ids: IdMap, place: Place) -> bool:
    """Return whether the target has a topic or partition by its metadata, or is making it."""
    target = ids.target
    is_id = not isinstance(place.topic, str)
    name = target.names.get(place.topic, "") if is_id else place.topic
    if name in target.being_made:
        return True
    if place.partition >= 0 and target.has_topic(name):
        return (name, place.partition) in target.leaders
    return target.has_topic(name)


def _is_idempotent(asked: Body) -> bool:
    """Return whether brokers recognise batches of a Produce that they have written already."""
    return bool(asked) and all(
        header.producer_id >= 0
        for _, _, partition in partitions(asked)
        for header in headers(partition["records"] or b"")
    )


def _without_records(ids: IdMap, captured: Body, answer: Body) -> dict[Place, str]:
    """Partitions that do not bring all captured data records: the Fetch came before the Produce, or
    transaction markers are not written yet."""
    if answer.get("error_code"):
        return {}
    answered = {
        (ids.topic_key(topic, is_captured=False), number): partition
        for topic, number, partition in partitions(answer)
    }
    found = {}
    for topic, number, partition in partitions(captured):
        last = last_data(partition["records"] or b"")
        if last < 0:
            continue
        other = answered.get((ids.topic_key(topic, is_captured=True), number), {})
        log = ids.names.of(topic), number
        wanted = ids.offsets.to_target(log, last)
        if not other.get("error_code") and last_data(other.get("records") or b"") < wanted:
            found[Place((), *log, "records")] = "it does not bring all records yet"
    return found


def _without_share_records(
    ids: IdMap, step: Step, asked: Body, captured: Body, answer: Body
) -> dict[Place, str]:
    """A member of a share group got fewer records than in the capture: the request came before they
    were produced, or before another member released them."""
    if not asked or set(error_codes(answer)) != set(error_codes(captured)):
        return {}
    held = answers.held_after(ids, step, asked)
    for log, first, last in answers.acquired(ids, answer, is_captured=False):
        held.add(log, first, last)
    owner = (("group", asked["group_id"]),)
    return {
        Place(owner, *log, "records"): "it does not get all records yet"
        for log, first, last in answers.acquired(ids, captured, is_captured=True)
        if not held.covers(log, first, last)
    }


def _without_assignment(ids: IdMap, step: Step, captured: Body, answer: Body) -> dict[Place, str]:
    """The coordinator computes assignments some time after a member joins: a member without any
    partition has none yet, if the captured one has."""
    group, member = member_of(step.exchange)
    if (
        answer["error_code"]
        or not is_assigned(assignment_in(captured))
        or is_assigned(assignment_in(answer))
        or is_assigned(ids.groups.assigned(group, member))
    ):
        return {}
    place = Place((("group", group), ("member", member)), what="assignment")
    return {place: "its member has no partitions yet"}


def note_not_final(ids: IdMap, step: Step, answer: Body) -> None:
    """Note what the target has done of a request that is sent again."""
    api_key = step.exchange.api_key
    if api_key == ApiKey.FETCH:
        ids.sessions.answered(ids.broker(step), step.number, 0, answer, is_final=False)
    elif api_key in SHARE_APIS and answer["error_code"] == 0:
        answers.note_share(ids, step, answer)
    elif api_key in MEMBER_HEARTBEATS and answer["error_code"] == 0:
        answers.member_followed(ids, step, answer, is_again=True)
