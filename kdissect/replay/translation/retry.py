"""Decides which answers are not final: the request is then sent again, as a client would.

A leader or a coordinator may not be ready yet, a change may not have reached every broker, and
records may arrive a moment after the Fetch for them. Retries have two limits: the attempts of a
step, and the number of an API's steps whose retries had no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.batch_headers import headers
from kdissect.replay.fields import FieldKind
from kdissect.replay.model import READ, Step
from kdissect.replay.translation import answers
from kdissect.replay.translation.groups import assignment_in, is_assigned
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import (
    MEMBER_HEARTBEATS,
    NO_TOPIC,
    OUT_OF_SEQUENCE,
    REBALANCING,
    REJOINING_APIS,
    SESSION_LOST,
    SHARE_APIS,
    TRANSIENT,
    entries,
    error_codes,
    member_of,
    request_fields,
    request_of,
    response_of,
)

Body = dict[str, Any]
Differs = Callable[[Step, Message, Message], bool]  # step, captured response, answer

# Attempts for a step, and steps of an API whose attempts had no effect before it is given up.
READ_ATTEMPTS, READS_MAX = 5, 4
FETCH_ATTEMPTS, FETCHES_MAX = 6, 16
SHARE_ATTEMPTS, SHARES_MAX = 4, 8
MEMBER_ATTEMPTS, MEMBERS_MAX = 8, 4
# Answers with fresh ids, or that writes do not change; Fetch has a rule of its own.
_NEVER_AGAIN = frozenset(
    {ApiKey.FETCH, ApiKey.API_VERSIONS, ApiKey.DESCRIBE_CLUSTER, ApiKey.GET_TELEMETRY_SUBSCRIPTIONS}
)

_INITIALISING = frozenset({ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.INVALID_RECORD_STATE})


class Retry:
    """The retries of one run. differs: whether an answer is `different` from the captured
    response; without it, reads that differ are not sent again."""

    def __init__(self, ids: IdMap, differs: Differs | None = None) -> None:
        self._ids = ids
        self._differs = differs
        self._has_writes = any(
            step.skipped is None and step.step_class != READ for step in ids.plan.steps
        )
        self.attempts: Counter[int] = Counter()  # by step
        self.futile: Counter[int] = Counter()  # by API key: steps retried to no effect
        self._reopened: set[int] = set()  # Fetch steps whose session the target had lost
        self._share_partitions: set[tuple[Any, ...]] = set()  # that answered without an error
        self._produces: dict[int, set[int]] = {}  # connection -> Produce steps to be sent again

    def reason(self, step: Step, answer: Message) -> str:
        """Return the reason to send the request again, "" if the answer is final.

        For a request that is sent again, the ids note the parts that the target took.
        """
        ids = self._ids
        captured = response_of(step.exchange)
        if captured is None:
            return ""
        api_key = step.exchange.api_key
        codes = list(error_codes(answer.body))
        again = set(codes) & (TRANSIENT - set(error_codes(captured.body)))
        if OUT_OF_SEQUENCE in codes and self._follows_retried_produce(step):
            again.add(OUT_OF_SEQUENCE)
        if api_key in REJOINING_APIS:
            again |= set(codes) & (REBALANCING - set(error_codes(captured.body)))
        if api_key in SHARE_APIS:
            again |= self._not_initialised(step, answer) - set(error_codes(captured.body))
        if again & NO_TOPIC and not _has_topics(ids, step):
            again -= NO_TOPIC
        if not again and api_key in MEMBER_HEARTBEATS:
            return self._member_heartbeat(step, captured, answer)
        if not again and api_key == ApiKey.FETCH:
            return self._fetch(step, captured, answer)
        if not again and api_key == ApiKey.SHARE_FETCH:
            return self._share_fetch(step, captured, answer)
        if not again:
            return self._read(step, captured, answer)
        if api_key == ApiKey.PRODUCE and not set(codes) <= again and not _is_idempotent(step):
            return ""  # some partitions were written, and would be so twice
        if api_key == ApiKey.FETCH:
            ids.sessions.answered(ids.broker(step), step.number, 0, answer.body, is_final=False)
        elif api_key in SHARE_APIS:
            if answer.body["error_code"] == 0:
                answers.note_share(ids, step, captured, answer)
        elif api_key == ApiKey.PRODUCE:
            self._produces.setdefault(step.connection, set()).add(step.number)
        return f"error {min(again)}: not ready yet"

    def _not_initialised(self, step: Step, answer: Message) -> set[int]:
        """Errors of share partitions that have not answered without one yet: their state may still
        be read from the share coordinator (KIP-932). Later the same errors are final."""
        request = request_of(step.exchange)
        group = "" if request is None else request.body["group_id"]
        error_codes = set()
        for topic in entries(answer.body["responses"]):
            for partition in entries(topic["partitions"]):
                place = group, topic["topic_id"], partition["partition_index"]
                if not partition["error_code"]:
                    self._share_partitions.add(place)
                elif place not in self._share_partitions:
                    error_codes.add(partition["error_code"])
        return error_codes & _INITIALISING

    def finish(self, step: Step) -> None:
        """The step is not sent again: its answer is final, or none came."""
        if self._produces:
            self._produces.get(step.connection, set()).discard(step.number)

    def _follows_retried_produce(self, step: Step) -> bool:
        """Return whether an earlier Produce of the connection is sent again: the sequence numbers
        before this one's are missing until then."""
        return any(number < step.number for number in self._produces.get(step.connection, ()))

    def _fetch(self, step: Step, captured: Message, answer: Message) -> str:
        """Captured records may be missing: the Fetch came before the Produce, or transaction
        markers are not written yet."""
        ids = self._ids
        lost = SESSION_LOST & ({answer.body.get("error_code", 0)} - set(error_codes(captured.body)))
        if lost and step.number not in self._reopened:
            self._reopened.add(step.number)
            reason = f"error {min(lost)}: its session is opened again"
        elif any(error_codes(answer.body)) or not _lacks(ids, captured, answer):
            return ""
        elif self._is_futile(step, FETCH_ATTEMPTS, FETCHES_MAX):
            return ""
        else:
            reason = "it does not bring all records yet"
            ids.lacking_fetches.add(step.number)
        self.attempts[step.number] += 1
        ids.sessions.answered(ids.broker(step), step.number, 0, answer.body, is_final=False)
        return reason

    def _share_fetch(self, step: Step, captured: Message, answer: Message) -> str:
        """A member of a share group got fewer records than in the capture: the request came before
        they were produced, or before another member released them."""
        ids = self._ids
        if set(error_codes(answer.body)) != set(error_codes(captured.body)):
            return ""
        request = request_of(step.exchange)
        if request is None:
            return ""
        held = answers.held_after(ids, step, request)
        for log, first, last in answers.acquired(ids, answer, is_captured=False):
            held.add(log, first, last)
        wanted = answers.acquired(ids, captured, is_captured=True)
        if all(held.covers(log, first, last) for log, first, last in wanted):
            return ""
        if self._is_futile(step, SHARE_ATTEMPTS, SHARES_MAX):
            return ""
        self.attempts[step.number] += 1
        answers.note_share(ids, step, captured, answer)
        return "it does not get all records yet"

    def _member_heartbeat(self, step: Step, captured: Message, answer: Message) -> str:
        """The coordinator computes assignments some time after a member joins, so a heartbeat is
        sent again until its member has partitions, if the captured one has."""
        groups, (group, member) = self._ids.groups, member_of(step.exchange)
        if (
            answer.body["error_code"]
            or not is_assigned(assignment_in(captured.body))
            or is_assigned(assignment_in(answer.body))
            or is_assigned(groups.assigned(group, member))
            or self._is_futile(step, MEMBER_ATTEMPTS, MEMBERS_MAX)
        ):
            return ""
        self.attempts[step.number] += 1
        answers.member_followed(self._ids, step, answer, is_again=True)
        return "its member has no partitions yet"

    def _read(self, step: Step, captured: Message, answer: Message) -> str:
        """Brokers take a moment until all of them see a change, so a read that differs is sent
        again."""
        if (
            step.step_class != READ
            or step.exchange.api_key in _NEVER_AGAIN
            or not self._has_writes
            or self._differs is None
            or not self._differs(step, captured, answer)
            or self._is_futile(step, READ_ATTEMPTS, READS_MAX)
        ):
            return ""
        self.attempts[step.number] += 1
        return "it differs: perhaps a change is not seen everywhere yet"

    def _is_futile(self, step: Step, attempts_max: int, steps_max: int) -> bool:
        api_key = step.exchange.api_key
        if self.attempts[step.number] >= attempts_max:
            del self.attempts[step.number]
            self.futile[api_key] += 1
            return True
        return self.futile[api_key] >= steps_max


def _lacks(ids: IdMap, captured: Message, answer: Message) -> bool:
    """Return whether a Fetch answer does not have all captured data records of a partition."""
    records = {
        (ids.topic_key(topic, is_captured=False), partition["partition_index"]): partition[
            "records"
        ]
        for topic, partition in _with_data(answer)
    }
    for topic, partition in _with_data(captured):
        number = partition["partition_index"]
        log = (ids.topic_name(topic.get("topic") or "", topic.get("topic_id")), number)
        answered = records.get((ids.topic_key(topic, is_captured=True), number), b"")
        if not ids.brings(log, partition["records"], answered):
            return True
    return False


def _with_data(response: Message) -> Iterator[tuple[Body, Body]]:
    """(topic, partition) of a Fetch response that have data records."""
    for topic in entries(response.body["responses"]):
        for partition in entries(topic["partitions"]):
            if any(
                not header.is_partial and not header.is_control
                for header in headers(partition["records"] or b"")
            ):
                yield topic, partition


def _is_idempotent(step: Step) -> bool:
    """Return whether brokers recognise batches of a Produce that they have written already."""
    request = request_of(step.exchange)
    return request is not None and all(
        header.producer_id >= 0
        for topic in entries(request.body["topic_data"])
        for partition in entries(topic["partition_data"])
        for header in headers(partition["records"] or b"")
    )


def _has_topics(ids: IdMap, step: Step) -> bool:
    """Return whether the target has the topics of a request, or a request to create them was
    sent."""
    names: set[str] = set()
    for field in request_fields(step.exchange, FieldKind.TOPIC, FieldKind.TOPIC_ID):
        is_name = field.kind is FieldKind.TOPIC
        names.update(each if is_name else ids.topic_name("", each) for each in field.values)
    names.discard("")
    target = ids.target
    return bool(names) and all(
        target.has_topic(name) or name in target.being_made for name in map(ids.topic, names)
    )
