"""The capture's requests in the target's terms: ids, names, sessions, epochs and offsets.

Theory of operation
-------------------
Requests are decoded, their meaningful fields (`walk`) changed, and encoded again; where nothing has
to change the captured bytes go out with another correlation id. What stands for what is learnt from
answers: the captured response and the target's answer to the same request are read side by side,
and what the one calls X the other calls Y. Later requests that say X are sent with Y.

Keys of what is learnt are always the capture's (names before renames), so that a capture replayed
on its own cluster, and one replayed elsewhere, go the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol import catalog
from kdissect.replay import adapt, learning
from kdissect.replay import messages as api
from kdissect.replay.adapt import Untranslatable
from kdissect.replay.groups import Groups
from kdissect.replay.messages import request_of, response_of
from kdissect.replay.model import (
    ADMIN,
    READ,
    Plan,
    SkipCode,
    Skipped,
    Step,
    TranslateOptions,
)
from kdissect.replay.offsets import Log, Offsets
from kdissect.replay.producers import Producers
from kdissect.replay.reencode import reencoded
from kdissect.replay.sessions import FetchSessions, ShareSession
from kdissect.replay.shortcuts import Shortcut, patched, shortcut
from kdissect.replay.target_facts import GROUP_KEY, TRANSACTION_KEY, ZERO_UUID, TargetFacts
from kdissect.replay.walk import Kind, spots
from kdissect.wire.message import Message, decode_message, encode_message

RENAME_KINDS = ("topic", "group", "transactional-id")
_BY_LEADER = frozenset(
    {
        api.PRODUCE_API, api.FETCH, api.LIST_OFFSETS, api.OFFSET_FOR_LEADER_EPOCH,
        api.DELETE_RECORDS, api.SHARE_FETCH, api.SHARE_ACKNOWLEDGE, api.DESCRIBE_PRODUCERS,
    }
)  # fmt: skip
_BY_GROUP = frozenset(
    {
        api.OFFSET_COMMIT, api.OFFSET_FETCH, api.JOIN_GROUP, api.HEARTBEAT, api.LEAVE_GROUP,
        api.SYNC_GROUP, api.DESCRIBE_GROUPS, api.DELETE_GROUPS, api.OFFSET_DELETE,
        api.TXN_OFFSET_COMMIT, api.CONSUMER_GROUP_HEARTBEAT, api.CONSUMER_GROUP_DESCRIBE,
        api.SHARE_GROUP_HEARTBEAT, api.SHARE_GROUP_DESCRIBE, api.STREAMS_GROUP_HEARTBEAT,
        api.STREAMS_GROUP_DESCRIBE, api.DESCRIBE_SHARE_GROUP_OFFSETS,
        api.ALTER_SHARE_GROUP_OFFSETS, api.DELETE_SHARE_GROUP_OFFSETS,
    }
)  # fmt: skip
_BY_TRANSACTION = frozenset(
    {
        api.INIT_PRODUCER_ID, api.ADD_PARTITIONS_TO_TXN, api.ADD_OFFSETS_TO_TXN, api.END_TXN,
        api.DESCRIBE_TRANSACTIONS,
    }
)  # fmt: skip


class Translator:
    """`model.Translation`. One for a run; not thread-safe."""

    def __init__(self, plan: Plan, options: TranslateOptions | None = None) -> None:
        self.options = options or TranslateOptions()
        self.plan = plan
        self.target = TargetFacts()
        self.offsets = Offsets(self.options.offsets)
        self.sessions = FetchSessions()
        self.producers = Producers()
        self.groups = Groups()
        self.topic_ids: dict[UUID, UUID] = {}  # captured -> target, where answers told both
        self.opaque: dict[Any, Any] = {}  # tokens, instance ids and the like: captured -> target
        # Set by who compares: whether an answer differs from the captured one.
        self.differs: Callable[[Step, Message, Message], bool] | None = None
        self.asked: Counter[int] = Counter()  # step -> how often it was asked again
        self.futile: Counter[int] = Counter()  # api_key -> steps asked again and again in vain
        self.has_writes = any(
            step.skipped is None and step.step_class != READ for step in plan.steps
        )
        self.marked: set[Log] = set()
        self.expected: dict[tuple[int, Log], int] = {}
        self.share_sessions: dict[tuple[Any, ...], ShareSession] = {}
        self.may_create = ADMIN in plan.options.allow
        facts = plan.workload.facts
        self.captured_nodes = sorted(facts.brokers)
        self.names = {
            UUID(topic_id): topic.name
            for topic in facts.topics.values()
            for topic_id in topic.topic_ids
        }
        self._renames: dict[str, dict[str, str]] = {kind: {} for kind in RENAME_KINDS}
        for kind, old, new in self.options.renames:
            if kind not in self._renames:
                raise ValueError(f"rename: {kind!r} is none of {', '.join(RENAME_KINDS)}")
            if self._renames[kind].setdefault(old, new) != new:
                raise ValueError(f"rename: {kind} {old!r} has two new names")
        self._shortcuts: list[Shortcut] = []
        for step in plan.steps:
            if step.skipped is not None:
                self._shortcuts.append(Shortcut())
                continue
            learning.from_capture(self, step.exchange)
            needs_topics = step.exchange.api_key in _NEEDS_TOPICS
            self._shortcuts.append(shortcut(self, step.exchange, needs_topics))
        self._last_answer: tuple[bytes, Message | None] = (b"", None)
        self._last_captured: tuple[int, Message | None] = (-1, None)

    def broker(self, step: Step) -> tuple[str, int]:
        """The captured broker that a step went to; sessions are the brokers'."""
        return self.plan.workload.connections[step.connection].broker

    def share_key(self, step: Step, body: Mapping[str, Any]) -> tuple[Any, ...]:
        """Whose share session a request is of, and at which node of the target."""
        return (self.target_node(step), body["group_id"] or "", body["member_id"] or "")

    # -- names and ids --------------------------------------------------------------------------

    def topic(self, name: str) -> str:
        return self._renames["topic"].get(name, name)

    def group(self, name: str) -> str:
        return self._renames["group"].get(name, name)

    def transactional_id(self, name: str) -> str:
        return self._renames["transactional-id"].get(name, name)

    @property
    def has_renames(self) -> bool:
        return bool(self.options.renames)

    @property
    def has_topic_renames(self) -> bool:
        return bool(self._renames["topic"])

    def renamed(self, kind: Kind, name: str) -> str:
        if kind is Kind.TOPIC:
            return self.topic(name)
        return self.group(name) if kind is Kind.GROUP else self.transactional_id(name)

    def topic_name(self, name: str, topic_id: UUID | None) -> str:
        """The capture's name of a topic that a captured message names or identifies."""
        if name or topic_id is None or topic_id == ZERO_UUID:
            return name
        return self.names.get(topic_id, str(topic_id))

    def topic_id(self, captured: UUID) -> UUID | None:
        """The target's id; None where neither answers nor names tell it."""
        if captured == ZERO_UUID:
            return captured
        found = self.topic_ids.get(captured)
        if found is None and captured in self.names:
            found = self.target.topic_ids.get(self.topic(self.names[captured]))
        return found

    def topic_key(self, topic: Mapping[str, Any], *, is_captured: bool) -> Any:
        """What tells a topic of a message from others: the target's name of it, else its id there.
        Captured and answered ones have equal keys, also where one is named and one identified."""
        name = topic.get("name") or topic.get("topic") or ""
        topic_id = topic.get("topic_id")
        if not is_captured:
            return name or self.target.names.get(topic_id, topic_id)  # type: ignore[arg-type]
        if name or topic_id is None:
            return self.topic(name)
        target_id = self.topic_id(topic_id)
        if target_id in self.target.names:
            return self.target.names[target_id]
        return target_id if target_id is not None else topic_id

    def bind_topic(self, captured: UUID | None, target: UUID | None) -> None:
        if captured and target and captured != ZERO_UUID and target != ZERO_UUID:
            self.topic_ids[captured] = target

    def leader_epoch(self, name: str, partition: int) -> int:
        """The target's, of the capture's topic; -1 unknown."""
        return self.target.leaders.get((self.topic(name), partition), (-1, -1))[1]

    def node(self, captured: int) -> int:
        return self.target.node_for(self.captured_nodes, captured)

    def captured_topic_name(self, name: str) -> str:
        """The capture's name of one of the target's topics."""
        for old, new in self._renames["topic"].items():
            if new == name:
                return old
        return name

    def is_marked(self, log: Log) -> bool:
        """Whether transactions of the capture write this partition, and so leave markers there."""
        return log in self.marked

    def expected_offset(self, step: Step, log: Log) -> int | None:
        """Which base offset the answer to a Produce should tell, by the batches before it."""
        return self.expected.get((step.number, log))

    # -- what the runner tells ------------------------------------------------------------------

    def learn_versions(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        self.target.ranges = dict(ranges)

    def learn_metadata(self, body: Mapping[str, Any]) -> None:
        self.target.learn_metadata(body)

    def learn_log_starts(self, starts: Mapping[tuple[str, int], int]) -> None:
        old_names = {new: old for old, new in self._renames["topic"].items()}
        for (name, partition), start in starts.items():
            self.offsets.target_starts((old_names.get(name, name), partition), start)

    # -- where to -------------------------------------------------------------------------------

    def wants_metadata(self, step: Step) -> list[str]:
        wanted = [self.topic(name) for name in self._shortcuts[step.number].needs]
        known = self.target
        return [
            name
            for name in wanted
            if name not in known.missing and not any((name, n) in known.leaders for n in (0, 1))
        ]

    def target_node(self, step: Step) -> int | None:
        if len(self.target.nodes) < 2:
            return None
        key = step.exchange.api_key
        request = request_of(step.exchange)
        found: int | None = None
        if request is not None and key in _BY_LEADER:
            found = self._leader(request)
        elif request is not None and key in (_BY_GROUP | _BY_TRANSACTION):
            found = self._coordinator(request, key in _BY_TRANSACTION)
        if found is not None and found in self.target.nodes:
            return found
        captured = self.plan.workload.connections[step.connection].node_id
        if captured is None:
            return None
        found = self.node(captured)
        return found if found in self.target.nodes else None

    def _leader(self, request: Message) -> int | None:
        """The node that leads most of the partitions that a request names."""
        votes: dict[int, int] = {}
        for kind, slot, holder, around in spots(request):
            if kind is Kind.PARTITION:
                name = self.topic(self.topic_name(around.topic, around.topic_id))
                value = holder[slot.name]
                for number in value if isinstance(value, list) else [value]:
                    leader = self.target.leaders.get((name, number))
                    if leader is not None:
                        votes[leader[0]] = votes.get(leader[0], 0) + 1
        return max(votes, key=lambda node: votes[node]) if votes else None

    def _coordinator(self, request: Message, is_transaction: bool) -> int | None:
        wanted = Kind.TRANSACTIONAL_ID if is_transaction else Kind.GROUP
        key_type = TRANSACTION_KEY if is_transaction else GROUP_KEY
        for kind, slot, holder, _ in spots(request):
            if kind is wanted:
                value = holder[slot.name]
                for name in value if isinstance(value, list) else [value]:
                    node = self.target.coordinators.get((key_type, self.renamed(kind, name)))
                    if node is not None:
                        return node
        return None

    # -- requests -------------------------------------------------------------------------------

    def api_version(self, step: Step) -> int:
        exchange = step.exchange
        if not self.options.reencode or exchange.api_key == api.API_VERSIONS:
            return exchange.api_version
        known = self.target.ranges.get(exchange.api_key)
        if known is None:
            return exchange.api_version
        first, last = known
        ours = catalog.api(exchange.api_key).request.versions
        nearest = max(first, min(last, exchange.api_version))
        return nearest if nearest in ours else exchange.api_version

    def request(self, step: Step, correlation_id: int) -> bytes | Skipped:
        exchange = step.exchange
        frame = exchange.request
        if frame is None:
            return Skipped(SkipCode.NOT_CAPTURED, exchange.request_missing)
        refused = self._refused(step)
        if refused is not None:
            return refused
        made = self._shortcuts[step.number]
        if made.is_plain:
            return _numbered(frame, correlation_id)
        if made.is_patched:
            quick = patched(self, made, frame, correlation_id)
            if quick is not None:
                return quick
        request = request_of(exchange)
        if request is None:  # ApiVersions in a version that nobody knows: its answer is for that
            return _numbered(frame, correlation_id)
        try:
            is_changed = adapt.translate(self, step, request)
            version = self.api_version(step)
            if version != exchange.api_version:
                request = reencoded(self, request, version)
                is_changed = True
            if not is_changed:
                return _numbered(frame, correlation_id)
            request.header["correlation_id"] = correlation_id
            return encode_message(request)
        except Untranslatable as cause:
            return Skipped(SkipCode.NOT_TRANSLATABLE, str(cause))
        except EncodeError as error:
            return Skipped(SkipCode.NOT_TRANSLATABLE, f"cannot be encoded: {error}")

    def _refused(self, step: Step) -> Skipped | None:
        """A version that the target does not speak: what a client would notice at once."""
        exchange = step.exchange
        if not self.target.ranges or exchange.api_key == api.API_VERSIONS:
            return None
        known = self.target.ranges.get(exchange.api_key)
        if known is None:
            reason = f"the target does not offer {step.api_name}"
        elif known[0] <= self.api_version(step) <= known[1]:
            return None
        else:
            reason = (
                f"the target speaks {step.api_name} v{known[0]} to v{known[1]}, "
                f"captured is v{exchange.api_version}"
            )
        captured = response_of(exchange)
        if captured is None and exchange.expects_response:
            return Skipped(SkipCode.API_VERSION, f"{reason}; it was not answered in the capture")
        return Skipped(SkipCode.API_VERSION, reason, is_finding=True)

    # -- answers --------------------------------------------------------------------------------

    def answer_of(self, step: Step, response: bytes) -> Message | None:
        """The decoded answer in the version that was sent; None where it cannot be decoded. Nobody
        may change it."""
        if self._last_answer[0] is response:
            return self._last_answer[1]
        try:
            answer = decode_message(
                response,
                side="response",
                api_key=step.exchange.api_key,
                api_version=self.api_version(step),
            )
        except (DecodeError, ValueError):
            answer = None
        self._last_answer = (response, answer)
        return answer

    def captured_of(self, step: Step) -> Message | None:
        """The decoded captured response; nobody may change it."""
        if self._last_captured[0] != step.number:
            self._last_captured = (step.number, response_of(step.exchange))
        return self._last_captured[1]

    def retry(self, step: Step, response: bytes) -> str:
        captured = step.exchange.response
        if captured is None or response[4:] == captured[4:]:
            return ""
        answer = self.answer_of(step, response)
        if answer is None:
            return ""
        return learning.retry(self, step, answer)

    def learn(self, step: Step, response: bytes) -> None:
        if not learning.teaches(step):
            return
        answer = self.answer_of(step, response)
        if answer is None:
            self.failed(step)
        else:
            learning.from_answer(self, step, answer)

    def failed(self, step: Step) -> None:
        learning.from_failure(self, step)

    def coordinator_keys(self) -> list[tuple[int, str]]:
        """(key type, target's name) of the coordinators that the plan will need: asked for ahead,
        a fresh target has made its internal topics before the first request."""
        found: dict[tuple[int, str], None] = {}
        for step in self.plan.steps:
            if step.skipped is not None:
                continue
            key = step.exchange.api_key
            if key not in _BY_GROUP and key not in _BY_TRANSACTION:
                continue
            request = request_of(step.exchange)
            for kind, slot, holder, _ in spots(request) if request is not None else ():
                if kind is Kind.GROUP or kind is Kind.TRANSACTIONAL_ID:
                    value = holder[slot.name]
                    key_type = GROUP_KEY if kind is Kind.GROUP else TRANSACTION_KEY
                    for name in value if isinstance(value, list) else [value]:
                        if name:
                            found[key_type, self.renamed(kind, name)] = None
        return list(found)

    def learn_coordinator(self, key_type: int, key: str, node_id: int) -> None:
        self.target.coordinators[key_type, key] = node_id


_NEEDS_TOPICS = _BY_LEADER | {
    api.OFFSET_COMMIT, api.OFFSET_FETCH, api.CONSUMER_GROUP_HEARTBEAT, api.TXN_OFFSET_COMMIT,
    api.ADD_PARTITIONS_TO_TXN,
}  # fmt: skip


def _numbered(frame: bytes, correlation_id: int) -> bytes:
    return frame[:4] + correlation_id.to_bytes(4, "big", signed=True) + frame[8:]
