"""Members, generations, assignments, fetch and share sessions: the capture's and the target's."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kdissect.codec import message_codec
from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol import catalog
from kdissect.replay.model import Broker, Log
from kdissect.replay.workload.fetch_sessions import Entries, by_topic, in_session
from kdissect.replay.workload.messages import Body, entries, partitions

# Partitions or tasks of a member, as the fields of a heartbeat's request that report them, with the
# topic ids of their side. Members of share groups report none.
Assigned = dict[str, list[Body]]
TASKS = ("active_tasks", "standby_tasks", "warmup_tasks")  # of streams groups (KIP-1071)
_EPOCH_MAX = 0x7FFFFFFF


class Groups:
    """Keys are the capture's groups, members, generations and epochs; values the target's, but for
    `captured`, and `_assignments`, which are the captured leader's."""

    def __init__(self) -> None:
        self.members: dict[tuple[str, str], str] = {}  # (group, member id) -> member id
        self.captured: dict[tuple[str, str], str] = {}  # (group, the target's id) -> first id
        # (group, member or "" for a classic group, captured value) -> value
        self._generations: dict[tuple[str, str, int], int] = {}
        self._leaders: dict[tuple[str, int], str] = {}
        self._assignments: dict[tuple[str, int], list[Body]] = {}
        # epochs of members in the last answer of the target; 0 if it has not joined
        self.last_epoch: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._assigned: dict[tuple[str, str], Assigned] = {}

    def add_captured(self, sync: Body) -> None:
        """Remember the assignments of a captured SyncGroup, if it is the leader's."""
        if sync.get("assignments"):
            self._assignments[sync["group_id"], sync["generation_id"]] = sync["assignments"]

    def member(self, group: str, captured: str) -> str:
        """The target's id of a member. Without one from an answer, the client chose the id itself
        (KIP-1082), and it stays as captured."""
        return self.members.get((group, captured), captured)

    def learn(self, group: str, captured: str, target: str) -> None:
        """The member has this id at the target; two of the capture may have one there."""
        self.members[group, captured] = target
        self.captured.setdefault((group, target), captured)

    def generation(self, group: str, member: str, captured: int) -> int:
        """The target's generation of a classic group, or epoch of a member.

        Values up to 0 have a meaning of their own (0: join, -1: leave), and stay.
        """
        if captured <= 0:
            return captured
        of_group = self._generations.get((group, "", captured), captured)
        return self._generations.get((group, member, captured), of_group)

    def assignments(
        self, group: str, generation: int, member: str, given: list[Body]
    ) -> list[Body]:
        """The assignments for this member's SyncGroup, with the capture's member ids.

        They are the captured leader's if the member leads the group at the target, else none.
        """
        leader = self._leaders.get((group, generation))
        if leader is None:
            return given
        if self.member(group, member) != leader:
            return []
        return given or self._assignments.get((group, generation), [])

    def assigned(self, group: str, member: str) -> Assigned:
        """The assignment of a member at the target."""
        return self._assigned.get((group, member), {})

    def joined(self, request: Body, captured: Body, answer: Body) -> None:
        """A JoinGroup of a classic group was answered."""
        if not request or not captured:
            return
        group = request["group_id"]
        if captured["member_id"] and answer["member_id"]:
            self.learn(group, captured["member_id"], answer["member_id"])
        if captured["error_code"] == 0 and answer["error_code"] == 0:
            generation = captured["generation_id"]
            self._generations[group, "", generation] = answer["generation_id"]
            self._leaders[group, generation] = answer["leader"]

    def heartbeat(self, request: Body, captured: Body, answer: Body) -> None:
        """A heartbeat of a consumer, share or streams group was answered."""
        if not request or not captured or answer["error_code"] or captured["error_code"]:
            return
        group = request["group_id"]
        member = captured["member_id"] or request["member_id"]
        if answer["member_id"] and member:
            self.learn(group, member, answer["member_id"])
        self.followed(group, member, captured["member_epoch"], answer)

    def followed(self, group: str, member: str, captured_epoch: int, answer: Body) -> None:
        """A heartbeat of a member was answered. captured_epoch: the one that it has in the capture.

        The heartbeat may be the replay's own, or one that is sent again.
        """
        epoch = answer["member_epoch"]
        self._generations[group, member, captured_epoch] = epoch
        self.last_epoch[group, member] = epoch
        if (assigned := assignment_in(answer)) is not None:
            self._assigned[group, member] = assigned


def assignment_in(answer: Body) -> Assigned | None:
    """The assignment in the answer to a heartbeat; None if it has none."""
    if answer.get("assignment") is not None:
        return {"topic_partitions": answer["assignment"]["topic_partitions"]}
    tasks = {name: answer[name] for name in TASKS if answer.get(name) is not None}
    return tasks or None


def with_topics(data: bytes, what: str, renamed: Callable[[str], str]) -> bytes:
    """The bytes of a consumer's ``Subscription`` or ``Assignment`` with other names of topics;
    bytes of other clients stay as they are."""
    definition = catalog.definition(f"ConsumerProtocol{what}")
    try:
        format_version, pos = message_codec.read_int16(data, 0)
        version = min(format_version, definition.versions.last)
        values, pos = message_codec.decode(definition, version, data, pos)
        if "topics" in values:
            values["topics"] = [renamed(each) for each in entries(values["topics"])]
        for holder in ("owned_partitions", "assigned_partitions"):
            for each in entries(values.get(holder)):
                each["topic"] = renamed(each["topic"])
        return data[:2] + message_codec.encode(definition, version, values) + data[pos:]
    except (DecodeError, EncodeError, ValueError):
        return data


def is_assigned(assigned: Assigned | None) -> bool:
    """Return whether an assignment has at least one partition or task."""
    return any(each["partitions"] for value in (assigned or {}).values() for each in value)


# -- share sessions (KIP-932) ---------------------------------------------------------------------
#
# A member of a share group has a session with each broker. Its epoch counts the requests that the
# broker has taken, and the broker remembers its partitions. Partitions of one captured broker may
# have several leaders at the target, so each of these nodes has a session with an epoch of its own.
# The target may give a member records in one answer that the captured broker gave it in several, so
# the records of both are counted.


@dataclass(slots=True)
class ShareSession:
    """A captured share session, as the target has it.

    partitions: by captured ids of topics. sent_epochs: node that got the last request, or a part of
    it -> its epoch. taken_epochs: by node, of the last request that it took. due, got: how many
    records of each log the captured member has got so far, and that at the target.
    """

    partitions: Entries = field(default_factory=dict)
    sent_epochs: dict[int | None, int] = field(default_factory=dict)
    taken_epochs: dict[int | None, int] = field(default_factory=dict)
    due: Counter[Log] = field(default_factory=Counter)
    got: Counter[Log] = field(default_factory=Counter)

    def epoch(self, node: int | None, captured: int) -> int:
        """The epoch of a request to a node. captured: 0 opens the session, -1 closes it; any other
        continues it, or opens it at a node that has none."""
        if captured <= 0 or node not in self.taken_epochs:
            return min(captured, 0)
        taken = self.taken_epochs[node]
        return taken + 1 if taken < _EPOCH_MAX else 1


class ShareSessions:
    """Sessions by captured broker, group and member.

    ready: share partitions that answered without an error, by the capture's names.
    acknowledged: steps that are sent again, whose acknowledgements the target has taken.
    """

    def __init__(self) -> None:
        self._sessions: dict[tuple[Broker, str, str], ShareSession] = {}
        self._owners: dict[tuple[str, str], Broker] = {}
        self.acknowledged: set[int] = set()
        self.ready: set[Log] = set()

    def of(self, broker: Broker, body: Body) -> ShareSession:
        """The session of a captured request."""
        key = broker, body["group_id"] or "", body["member_id"] or ""
        return self._sessions.setdefault(key, ShareSession())

    def request(self, broker: Broker, number: int, body: Body, target_member: str) -> None:
        """Prepare a captured body. number: of the step. target_member: the member's id at the
        target. A member's sessions with several captured brokers have ids of their own, but for the
        first of them."""
        session, is_new = self.of(broker, body), body["share_session_epoch"] == 0
        session.partitions = in_session({} if is_new else session.partitions, body)
        if self._owners.setdefault((body["group_id"], body["member_id"]), broker) != broker:
            body["member_id"] = stand_in(target_member, broker)
        if number in self.acknowledged:
            for _, _, partition in partitions(body):
                partition["acknowledgement_batches"] = []
        if "forgotten_topics_data" in body and body["share_session_epoch"] >= 0:
            silent = {
                key: {**each, "acknowledgement_batches": []}
                for key, each in session.partitions.items()
            }
            body["topics"] = by_topic(silent | in_session({}, body))

    def set_epochs(
        self, broker: Broker, body: Body, nodes: Iterable[int | None]
    ) -> dict[int | None, int]:
        """Store and return the epochs for the nodes that get a captured request, or a part of it;
        the end of the session goes to all that have one."""
        session, captured = self.of(broker, body), body["share_session_epoch"]
        nodes = session.taken_epochs if captured < 0 and session.taken_epochs else nodes
        session.sent_epochs = {node: session.epoch(node, captured) for node in nodes}
        return session.sent_epochs

    def answered(self, broker: Broker, body: Body, answer: Body) -> ShareSession:
        """Note that the target has taken a request. body: of the captured request."""
        session, captured = self.of(broker, body), int(body["share_session_epoch"])
        if answer["error_code"] != 0 or captured < 0:
            session.taken_epochs.clear()
            session.due, session.got = Counter(), Counter()
        else:
            session.taken_epochs.update(session.sent_epochs)
        return session


def stand_in(member_id: str, broker: Broker) -> str:
    """A member id for the share session that a member had with one captured broker.

    A member has one share session with a node (KIP-932). Partitions of several captured brokers may
    have one leader at the target; ids of their own keep the sessions apart there: nodes that lead
    partitions do not look up who is a member. The ids are uuids, as Kafka writes them.
    """
    text = f"{member_id} {broker[0]} {broker[1]}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
