"""Fetch sessions (KIP-227): the capture's, and those that the target opened for them.

An incremental Fetch names only the partitions that change; for all others, the broker uses the
session's earlier requests. The target may not have the session, or may have dropped it. So kdissect
remembers all partitions of each captured session, and opens it again with a full Fetch of them.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from typing import Any

from kdissect.replay.translation.offsets import Log
from kdissect.replay.workload.messages import entries
from kdissect.replay.workload.transient import SESSION_LOST

FINAL_EPOCH, INITIAL_EPOCH = -1, 0

Body = dict[str, Any]
Broker = tuple[str, int]  # the captured address


@dataclass(slots=True)
class _TargetSession:
    """A captured fetch session, as the target has it.

    target_id: its id at the target, 0 if the target has none now.
    node: the target's node that has it.
    epoch: of the next request to the target.
    partitions: (topic, partition) -> entry of a Fetch request.
    """

    target_id: int = 0
    node: int | None = None
    epoch: int = 1
    partitions: dict[tuple[Any, int], Body] = field(default_factory=dict)

    def add(self, body: Body) -> None:
        """Add the partitions that a request names, and remove those that it forgets."""
        for topic in entries(body.get("forgotten_topics_data")):
            for partition in topic["partitions"]:
                self.partitions.pop((_key(topic), partition), None)
        for topic in entries(body["topics"]):
            for partition in entries(topic["partitions"]):
                # a copy: the request's own is changed to the target's terms
                self.partitions[_key(topic), partition["partition"]] = dict(partition)


def stand_in(member_id: str, broker: Broker) -> str:
    """A member id for the share session that a member had with one captured broker.

    A member has one share session with a node (KIP-932). Where several captured brokers are one
    node at the target, the sessions with them are kept apart by ids of their own: nodes that lead
    partitions do not look up who is a member. The ids are uuids, as Kafka writes them.
    """
    text = f"{member_id} {broker[0]} {broker[1]}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


class AcquiredOffsets:
    """Offsets that a share session has got and not acknowledged: ranges by log, disjoint."""

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


class FetchSessions:
    """Sessions by captured broker and id: a client may go on with one over another connection."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[Broker, int], _TargetSession] = {}
        # step number -> session of a request in flight; its answer has the session's id
        self._asked: dict[int, _TargetSession] = {}

    def fetched_partitions(self, broker: Broker, body: Body) -> list[tuple[Any, int]]:
        """(topic or its id, partition) of all partitions that a request fetches.

        These are the partitions that it names, and those that its session already has.
        """
        named = {
            (_key(topic), partition["partition"]): None
            for topic in entries(body["topics"])
            for partition in entries(topic["partitions"])
        }
        session = self._sessions.get((broker, body.get("session_id", 0)))
        if session is None or body["session_epoch"] in (FINAL_EPOCH, INITIAL_EPOCH):
            return list(named)
        forgotten = {
            (_key(topic), partition)
            for topic in entries(body.get("forgotten_topics_data"))
            for partition in topic["partitions"]
        }
        return [
            *(key for key in session.partitions if key not in forgotten and key not in named),
            *named,
        ]

    def request(
        self,
        broker: Broker,
        number: int,
        body: Body,
        captured_code: int = 0,
        nodes: tuple[int | None, ...] = (None,),
    ) -> tuple[Body, str]:
        """The body to send for a Fetch, and "", or the reason why it cannot be sent.

        A session belongs to one node. If `nodes` has several, the body is a full Fetch of all
        partitions of the session, without a session. Parameters are those of `_request`.
        """
        found, reason = self._request(broker, number, body, captured_code, nodes[0])
        session = self._asked.get(number)
        if len(nodes) < 2 or reason or session is None:
            return found, reason
        session.target_id = 0
        return {
            **body,
            "session_id": 0,
            "session_epoch": FINAL_EPOCH,
            "topics": _grouped(session),
            "forgotten_topics_data": [],
        }, ""

    def _request(
        self, broker: Broker, number: int, body: Body, captured_code: int, node: int | None
    ) -> tuple[Body, str]:
        """The body with the target's session id and epoch, and "", or why it cannot be sent.

        Topic ids in it are still the capture's.

        number: of the step.
        captured_code: the error code of the captured response. If it says that the broker had lost
        the session, the body is sent as captured: the target does not know the session either.
        """
        captured_id, epoch = body["session_id"], body["session_epoch"]
        if (captured_id == 0 and epoch == FINAL_EPOCH) or captured_code in SESSION_LOST:
            return body, ""
        session = self._sessions.get((broker, captured_id))
        if epoch in (FINAL_EPOCH, INITIAL_EPOCH):
            if epoch == INITIAL_EPOCH:
                opened = self._asked[number] = _TargetSession(node=node)
                opened.add(body)
            return {**body, "session_id": session.target_id if session else 0}, ""
        if session is None:
            session = self._sessions[broker, captured_id] = _TargetSession(node=node)
            session.add(body)
            if not session.partitions:
                return body, "its fetch session began before the capture"
        elif number not in self._asked:
            session.add(body)
        self._asked[number] = session
        if session.target_id and session.node == node:
            return {**body, "session_id": session.target_id, "session_epoch": session.epoch}, ""
        session.target_id, session.node = 0, node
        return {
            **body,
            "session_id": 0,
            "session_epoch": INITIAL_EPOCH,
            "topics": _grouped(session),
            "forgotten_topics_data": [],
        }, ""

    def answered(
        self, broker: Broker, number: int, captured_id: int, answer: Body, is_final: bool
    ) -> None:
        """Note the session of the target's answer to a step.

        captured_id: session id in the captured response; 0 if there is none, or no response.
        """
        session = self._asked.get(number)
        if session is None:
            return
        if answer.get("error_code", 0) in SESSION_LOST:
            session.target_id = 0
        else:
            target_id = answer.get("session_id", 0)
            if target_id != session.target_id:
                session.target_id, session.epoch = target_id, 1
            else:
                session.epoch = session.epoch + 1 if session.epoch < 0x7FFFFFFF else 1
        if is_final:
            del self._asked[number]
            if captured_id:
                self._sessions[broker, captured_id] = session

    def failed(self, number: int) -> None:
        """Drop the target's session of a step without answer, since its epoch is now unknown."""
        session = self._asked.pop(number, None)
        if session is not None:
            session.target_id = 0


def _key(topic: Body) -> Any:
    return topic["topic_id"] if "topic_id" in topic else topic["topic"]


def _grouped(session: _TargetSession) -> list[Body]:
    """All partitions of a session, as `topics` of a full Fetch."""
    topics: dict[Any, Body] = {}
    for (key, _), partition in session.partitions.items():
        name = "topic" if isinstance(key, str) else "topic_id"
        topic = topics.setdefault(key, {name: key, "partitions": []})
        topic["partitions"].append(dict(partition))
    return list(topics.values())
