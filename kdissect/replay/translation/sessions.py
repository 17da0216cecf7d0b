"""Captured fetch sessions (KIP-227), and share sessions (KIP-932) of both sides.

An incremental Fetch names only the partitions that change; for all others, the broker uses the
session's earlier requests. The target may drop a session at any time, and a session belongs to one
node. So a replay has none there: it sends each Fetch for all partitions of its captured session.

A member of a share group has a session with each broker. Its epoch counts the requests that the
broker has taken, and the broker remembers its partitions. The target may give a member records in
one answer that the captured broker gave it in several, so the records of both are counted.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from kdissect.replay.model import Untranslatable
from kdissect.replay.translation.offsets import Log
from kdissect.replay.workload.messages import Body, entries, partitions

FINAL_EPOCH, INITIAL_EPOCH = -1, 0
_EPOCH_MAX = 0x7FFFFFFF

Broker = tuple[str, int]  # the captured address


class FetchSessions:
    """The partitions of captured sessions, by broker and session id: a client may go on with one
    over another connection."""

    def __init__(self) -> None:
        # (topic or its id, partition) -> entry of a Fetch request
        self._sessions: dict[tuple[Broker, int], dict[tuple[Any, int], Body]] = {}

    def partitions(self, broker: Broker, body: Mapping[str, Any]) -> dict[tuple[Any, int], Body]:
        """(topic or its id, partition) -> entry of all partitions that a captured request fetches:
        those that it names, and those that its session already has."""
        key, is_incremental = (broker, body["session_id"]), body["session_epoch"] > INITIAL_EPOCH
        found = dict(self._sessions.get(key, {})) if is_incremental else {}
        for topic in entries(body.get("forgotten_topics_data")):
            for number in topic["partitions"]:
                found.pop((_key(topic), number), None)
        for topic, number, partition in partitions(body):
            found[_key(topic), number] = partition
        return found

    def whole(self, broker: Broker, body: Body, captured: Body) -> Body:
        """The body to send for a captured Fetch: without a session, for all its partitions. Topic
        ids in it are still the capture's.

        captured: body of the captured response, which has the id of a new session.
        Raises Untranslatable for a session whose partitions are unknown.
        """
        if body["session_epoch"] == FINAL_EPOCH:
            return {**body, "session_id": 0}
        found = self.partitions(broker, body)
        if not found and body["session_epoch"] > INITIAL_EPOCH:
            raise Untranslatable("its fetch session began before the capture")
        topics: dict[Any, Body] = {}
        for (key, _), partition in found.items():
            name = "topic" if isinstance(key, str) else "topic_id"
            topic = topics.setdefault(key, {name: key, "partitions": []})
            topic["partitions"].append(dict(partition))
        if session_id := captured.get("session_id", 0):
            self._sessions[broker, session_id] = found
        return {
            **body, "session_id": 0, "session_epoch": FINAL_EPOCH, "topics": list(topics.values()),
            "forgotten_topics_data": [],
        }  # fmt: skip


def _key(topic: Body) -> Any:
    return topic["topic_id"] if "topic_id" in topic else topic["topic"]


def _after(epoch: int) -> int:
    """The epoch of a session's next request."""
    return epoch + 1 if epoch < _EPOCH_MAX else 1


@dataclass(slots=True)
class ShareSession:
    """A captured share session, as the target has it.

    partitions: (captured topic id, partition). epochs: by node of the target, of the next request.
    due, got: how many records of each log the captured member has got so far, and that at the
    target.
    """

    partitions: set[tuple[UUID, int]] = field(default_factory=set)
    epochs: dict[int | None, int] = field(default_factory=dict)
    due: Counter[Log] = field(default_factory=Counter)
    got: Counter[Log] = field(default_factory=Counter)


class ShareSessions:
    """Sessions by captured broker, group and member.

    ready: (the target's topic id, partition) of share partitions that answered without an error.
    acknowledged: steps that are sent again, whose acknowledgements the target has taken.
    """

    def __init__(self) -> None:
        self._sessions: dict[tuple[Broker, str, str], ShareSession] = {}
        self._owners: dict[tuple[int | None, str, str], Broker] = {}
        self.acknowledged: set[int] = set()
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
        if number in self.acknowledged:
            for _, _, partition in partitions(body):
                partition["acknowledgement_batches"] = []

    def answered(self, broker: Broker, node: int | None, body: Body, answer: Body) -> ShareSession:
        """Note that the target has taken a request. body: of the captured request."""
        session, epoch = self.of(broker, body), int(body["share_session_epoch"])
        if answer["error_code"] != 0 or epoch < 0:
            session.epochs.pop(node, None)
            session.due, session.got = Counter(), Counter()
        else:
            session.epochs[node] = _after(session.epochs.get(node, epoch) if epoch else 0)
        self.ready.update(
            (topic["topic_id"], number)
            for topic, number, each in partitions(answer)
            if not each["error_code"]
        )
        return session


def stand_in(member_id: str, broker: Broker) -> str:
    """A member id for the share session that a member had with one captured broker.

    A member has one share session with a node (KIP-932). Where several captured brokers are one
    node at the target, the sessions with them are kept apart by ids of their own: nodes that lead
    partitions do not look up who is a member. The ids are uuids, as Kafka writes them.
    """
    text = f"{member_id} {broker[0]} {broker[1]}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
