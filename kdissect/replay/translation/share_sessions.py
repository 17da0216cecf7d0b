"""Share sessions (KIP-932): the capture's, and those that the target opened for them.

A member of a share group has a session with each broker. Its epoch counts the requests that the
broker has taken, and the broker remembers its partitions. The target may give a member records in
one answer that the captured broker gave it in several, so what a session holds is known here.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from kdissect.replay.translation.offsets import Log
from kdissect.replay.workload.messages import entries, partitions

Body = dict[str, Any]
Broker = tuple[str, int]  # the captured address
_EPOCH_MAX = 0x7FFFFFFF


class AcquiredOffsets:
    """Offsets that a member has got and not acknowledged: ranges by log, disjoint."""

    def __init__(self) -> None:
        self._ranges: dict[Log, list[tuple[int, int]]] = {}

    def copy(self) -> AcquiredOffsets:
        made = AcquiredOffsets()
        made._ranges = {log: list(ranges) for log, ranges in self._ranges.items()}
        return made

    def add(self, log: Log, first: int, last: int) -> None:
        """Both ends included; ranges that touch become one."""
        kept = []
        for low, high in self._ranges.get(log, ()):
            if high + 1 < first or last + 1 < low:
                kept.append((low, high))
            else:
                first, last = min(first, low), max(last, high)
        self._ranges[log] = sorted([*kept, (first, last)]) if first <= last else kept

    def remove(self, log: Log, first: int, last: int) -> None:
        parts = [
            part
            for low, high in self._ranges.get(log, ())
            for part in ((low, min(high, first - 1)), (max(low, last + 1), high))
            if part[0] <= part[1]
        ]
        self._ranges[log] = sorted(set(parts))

    def covers(self, log: Log, first: int, last: int) -> bool:
        """Return whether one range holds all of it."""
        return any(low <= first and last <= high for low, high in self._ranges.get(log, ()))


@dataclass(slots=True)
class ShareSession:
    """A captured share session, as the target has it.

    partitions: (captured topic id, partition). epochs: by node of the target, of the next request.
    held: what the member has got at the target and not acknowledged.
    """

    partitions: set[tuple[UUID, int]] = field(default_factory=set)
    epochs: dict[int | None, int] = field(default_factory=dict)
    held: AcquiredOffsets = field(default_factory=AcquiredOffsets)


class ShareSessions:
    """Sessions by captured broker, group and member.

    ready: (the target's topic id, partition) of share partitions that answered without an error.
    """

    def __init__(self) -> None:
        self._sessions: dict[tuple[Broker, str, str], ShareSession] = {}
        self._owners: dict[tuple[int | None, str, str], Broker] = {}
        self._acknowledged: set[int] = set()  # steps that are sent again
        self.ready: set[tuple[UUID, int]] = set()

    def of(self, broker: Broker, body: Mapping[str, Any]) -> ShareSession:
        """The session of a captured request."""
        key = broker, body["group_id"] or "", body["member_id"] or ""
        return self._sessions.setdefault(key, ShareSession())

    def partitions(self, broker: Broker, body: Mapping[str, Any]) -> set[tuple[UUID, int]]:
        """The partitions of the session after a request."""
        is_new = body["share_session_epoch"] == 0
        found = set() if is_new else set(self.of(broker, body).partitions)
        for topic in entries(body.get("forgotten_topics_data")):
            found -= {(topic["topic_id"], number) for number in topic["partitions"]}
        return found | {(topic["topic_id"], number) for topic, number, _ in partitions(body)}

    def request(
        self, broker: Broker, number: int, node: int | None, body: Body, target_member: str
    ) -> None:
        """Give a captured body the target's epoch.

        number: of the step. target_member: the member's id at the target. Where a member's sessions
        with several captured brokers meet at one node, the later ones have ids of their own.
        """
        session = self.of(broker, body)
        session.partitions = self.partitions(broker, body)
        owner = self._owners.setdefault((node, body["group_id"], body["member_id"]), broker)
        if owner != broker:
            body["member_id"] = stand_in(target_member, broker)
        if body["share_session_epoch"] > 0:
            body["share_session_epoch"] = session.epochs.get(node, body["share_session_epoch"])
        if number in self._acknowledged:
            for _, _, partition in partitions(body):
                partition["acknowledgement_batches"] = []

    def answered(
        self, broker: Broker, number: int, node: int | None, body: Body, answer: Body
    ) -> ShareSession:
        """Note that the target has taken a request. body: of the captured request."""
        session, epoch = self.of(broker, body), int(body["share_session_epoch"])
        if answer["error_code"] != 0 or epoch < 0:
            session.epochs.pop(node, None)
            session.held = AcquiredOffsets()
        else:
            last = session.epochs.get(node, epoch) if epoch else 0
            session.epochs[node] = last + 1 if last < _EPOCH_MAX else 1
        self.ready.update(
            (topic["topic_id"], number)
            for topic, number, each in partitions(answer)
            if not each["error_code"]
        )
        return session

    def is_acknowledged(self, number: int) -> bool:
        """Return whether the target took the acknowledgements of a step that is sent again."""
        return number in self._acknowledged

    def sent_again(self, number: int) -> None:
        self._acknowledged.add(number)

    def finished(self, number: int) -> None:
        self._acknowledged.discard(number)


def stand_in(member_id: str, broker: Broker) -> str:
    """A member id for the share session that a member had with one captured broker.

    A member has one share session with a node (KIP-932). Where several captured brokers are one
    node at the target, the sessions with them are kept apart by ids of their own: nodes that lead
    partitions do not look up who is a member. The ids are uuids, as Kafka writes them.
    """
    text = f"{member_id} {broker[0]} {broker[1]}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
