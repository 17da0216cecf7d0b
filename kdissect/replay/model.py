"""The words of replay: a workload is planned to steps, run to outcomes, judged to verdicts.

Plain data, no sockets, no files. Times are int64 nanoseconds: ``*_time_ns`` since 1970 as captured,
``at_ns`` since the workload's first request. -1 is unknown. A *frame* is without its size prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from kdissect.codec.message import Message
from kdissect.errors import Error
from kdissect.pipeline.selection import Selection

if TYPE_CHECKING:
    from kdissect.replay.workload.fetch_sessions import Entries

READ, PRODUCE, GROUPS, TRANSACTIONS, ADMIN = "read", "produce", "groups", "transactions", "admin"
CLASSES = (READ, PRODUCE, GROUPS, TRANSACTIONS, ADMIN)
WRITING_CLASSES = CLASSES[1:]  # each has to be allowed by name
DELETE_EXISTING = "delete-existing"  # allowed beside classes: delete what the run did not make
FOREVER_NS = 1 << 62  # later than any moment of a run
Log = tuple[str, int]  # the capture's name of a topic, partition
Broker = tuple[str, int]  # its captured address
ANONYMOUS_PRINCIPAL = "User:ANONYMOUS"  # Kafka's principal of a client without TLS and SASL


# -- the capture ------------------------------------------------------------------------------


@dataclass(slots=True)
class Exchange:
    """A captured request with its response, or a request alone.

    connection: place of its connection in the workload. index: its own place there.
    request, response: frames; None if it was not captured whole, or cannot be rebuilt, and then
        `request_missing` / `response_missing` says why in one clause ("" if none was due).
    request_time_ns: the response's time if the request was not captured.
    expects_response: False for Produce with acks 0.
    internal_reason: why this is traffic among brokers and controllers, "" if it is a client's.
    request_packet, response_packet: Wireshark's frame numbers, -1 unknown. capture: the file's
        path. decoded: as of `workload.messages.request_of`, by side.
    """

    exchange_id: int
    connection: int
    index: int
    api_key: int
    api_version: int
    client_id: str | None
    request: bytes | None
    response: bytes | None
    request_time_ns: int
    request_end_time_ns: int
    response_time_ns: int = -1
    response_end_time_ns: int = -1
    expects_response: bool = True
    request_missing: str = ""
    response_missing: str = ""
    internal_reason: str = ""
    request_packet: int = -1
    response_packet: int = -1
    capture: str = ""
    decoded: dict[str, Message | None] = field(default_factory=dict, init=False, repr=False)

    @property
    def latency_ns(self) -> int:
        """Last byte of the request to first byte of the response; -1 unknown."""
        if self.response_time_ns < 0 or self.request_end_time_ns < 0:
            return -1
        return self.response_time_ns - self.request_end_time_ns


@dataclass(slots=True)
class Connection:
    """A captured connection; its exchanges in the order of their requests.

    node_id: of its broker, from captured metadata; None if unknown. principal: of its client,
    "User:alice" or `ANONYMOUS_PRINCIPAL`; "" if unknown.
    """

    connection_id: int
    client: tuple[str, int]
    broker: tuple[str, int]
    node_id: int | None = None
    principal: str = ""
    exchanges: list[Exchange] = field(default_factory=list)


@dataclass(slots=True)
class TopicFacts:
    """A topic as the capture shows it.

    partition_count, replication_factor: 0 if unknown.
    configs: those that a captured request set, or that a response lists as not default.
    is_created: a captured CreateTopics created it, so its replay will create it at the target.
    first_time_ns: when the capture first shows that it exists; -1 if requests only ask for it.
    """

    name: str
    topic_ids: list[str] = field(default_factory=list)  # uuid text, str(uuid.UUID)
    partition_count: int = 0
    replication_factor: int = 0
    configs: dict[str, str] = field(default_factory=dict)
    is_created: bool = False
    is_internal: bool = False
    first_time_ns: int = -1


@dataclass(slots=True)
class WorkloadFacts:
    """Facts about the captured cluster, by the messages up to `--until`.

    brokers: node id -> (host, port) as advertised; listeners: (ip, port) that connections went to.
    topics: by name, `__cluster_metadata` and other internal ones included and marked.
    fetch_sessions: those that began before `--from`, by broker and id.
    offered: API key -> (first, last) version that a broker offered clients; the longest list.
    """

    cluster_ids: list[str] = field(default_factory=list)
    brokers: dict[int, tuple[str, int]] = field(default_factory=dict)
    listeners: list[tuple[str, int]] = field(default_factory=list)
    topics: dict[str, TopicFacts] = field(default_factory=dict)
    fetch_sessions: dict[tuple[Broker, int], Entries] = field(default_factory=dict)
    offered: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Workload:
    """Captured connections, by the time of their first request or start, and facts about all.

    source: description of the input, for people. kind: "capture" or "saved".
    notes: what a user should know about the source (frames that could not be rebuilt, redaction).
    """

    source: str
    kind: str
    connections: list[Connection]
    facts: WorkloadFacts
    notes: list[str] = field(default_factory=list)

    def exchanges(self) -> Iterator[Exchange]:
        for connection in self.connections:
            yield from connection.exchanges


# -- the plan ---------------------------------------------------------------------------------


class SkipCode(Enum):
    """The reason for skipping a step; outputs show the value."""

    INTERNAL = "internal"  # brokers and controllers among themselves; never sent
    TARGET_OWN = "target_own"  # SASL and the like: the runner speaks the target's own
    NOT_ALLOWED = "not_allowed"  # a writing class that --allow does not name
    NOT_CAPTURED = "not_captured"  # the request is not there whole, or cannot be rebuilt
    UNKNOWN_API = "unknown_api"  # no definition: it cannot be translated
    API_VERSION = "api_version"  # the target does not speak this api_version: a difference
    OTHER_PRINCIPAL = "other_principal"  # refused to another user than the replay logs in as
    NOT_TRANSLATABLE = "not_translatable"  # an id in it has no counterpart at the target
    NOT_READY = "not_ready"  # refused in the capture without effect; with acks > 0 sent again
    FILTERED = "filtered"  # left out by an option
    NOT_REACHED = "not_reached"  # the run was interrupted before


@dataclass(frozen=True, slots=True)
class Skipped:
    """Instead of a frame: this is not sent. `reason` is one clause for people."""

    code: SkipCode
    reason: str


class OptionError(Error, ValueError):
    """An option cannot be used as given, or another one is missing; the text says which."""


class Untranslatable(Exception):
    """Something in a request has no counterpart at the target: one clause for people."""


class Mode(Enum):
    """The access of a request to a resource."""

    READ = "read"  # after writes that were answered before; writes wait for it in turn
    # as READ, but no write waits for it: a Fetch may wait at the broker for that write
    PEEK = "peek"
    WRITE = "write"
    COMMUTING_WRITE = "add"  # a write that commutes with others


WRITES = frozenset({Mode.WRITE, Mode.COMMUTING_WRITE})
Resource = tuple[Any, ...]  # see `planning.resources`
ResourceAccess = tuple[Resource, Mode]


@dataclass(slots=True)
class Step:
    """One request to send.

    number: its place in `ReplayPlan.steps`, which is in order of captured request times.
    skipped: why it is not sent at all, or None.
    accesses: each resource that it reads or changes, once; of a skipped step too.
    depends_on: steps that must be *complete* before this is sent: answered, failed, timed out or
        skipped. A Produce with acks 0 is complete when the ApiVersions that the replay sends behind
        it was answered or failed.
    sent_after: steps that must have been *sent* (or be complete) before this is sent.
        Order within the connection is not in either list where requests were pipelined: the runner
        sends a connection's steps in the order of `ReplayPlan.lanes` always.
    at_ns: captured time of sending since the workload's first request.
    is_racing: what it reads was changing, or its order is not kept; either result is right.
    is_early: topics or partitions were made moments before; the captured broker may lack them yet.
    awaits: groups that have to be empty and transactions that have to be over before this is sent,
        because the capture shows that they had run out of time; each with the time that this may
        take, in ns.
    """

    number: int
    connection: int
    exchange: Exchange
    api_name: str
    step_class: str
    at_ns: int
    expects_response: bool
    is_racing: bool = False
    is_early: bool = False
    awaits: tuple[tuple[Resource, int], ...] = ()
    skipped: Skipped | None = None
    accesses: tuple[ResourceAccess, ...] = ()
    depends_on: tuple[int, ...] = ()
    sent_after: tuple[int, ...] = ()

    def named(self, kind: str) -> list[str]:
        """The captured names of the resources of a kind ("topic", "group", "transactional-id")."""
        return [resource[1] for resource, _ in self.accesses if resource[0] == kind]

    @property
    def changed(self) -> list[Resource]:
        """The resources that it changes."""
        return [resource for resource, mode in self.accesses if mode in WRITES]


@dataclass(slots=True)
class PlanOptions:
    """Options of a plan: which requests of a workload to replay, and how strictly in order.

    allow: as of `target.guard.parse_allow`. selection: only requests of its APIs, clients, topics
        and groups.
    principal: of the replay at the target; "" if unknown.
    wait_for_data: a Fetch waits until the requests that produced what it returned are answered,
        even when they came while it waited at the broker (for paces other than the recorded).
    """

    allow: frozenset[str] = frozenset()
    selection: Selection = field(default_factory=Selection)
    principal: str = ""
    wait_for_data: bool = False


@dataclass(slots=True)
class ReplayPlan:
    """steps in order of time; lanes: for each connection the numbers of its steps, in order."""

    workload: Workload
    options: PlanOptions
    steps: list[Step]
    lanes: list[list[int]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TranslateOptions:
    """How a plan is brought to a target.

    offsets: "captured", "earliest" or "relative". renames: (kind, old) -> new, kind "topic",
    "group" or "transactional-id". reencode: send at the nearest version that the target speaks.
    makes_topics: before the run, those that the capture shows and no request makes.
    has_reference: the answers are compared with another target's, not with the captured ones.
    """

    offsets: str = "relative"
    renames: Mapping[tuple[str, str], str] = field(default_factory=dict)
    reencode: bool = False
    makes_topics: bool = False
    has_reference: bool = False

    @cached_property
    def old_names(self) -> dict[tuple[str, str], str]:
        """(kind, new) -> old."""
        return {(kind, new): old for (kind, old), new in self.renames.items()}

    def name(self, kind: str, captured: str) -> str:
        """The target's name of one of the capture's topics, groups or transactional ids."""
        return self.renames.get((kind, captured), captured)

    def captured_name(self, kind: str, name: str) -> str:
        """The capture's name of one of the target's."""
        return self.old_names.get((kind, name), name)


# -- what came back ---------------------------------------------------------------------------


class Verdict(Enum):
    """Of an outcome; outputs show the value."""

    SAME = "same"  # nothing differs but what had to be translated
    TOLERATED = "tolerated"  # differs as a rule allows
    DIFFERENT = "different"
    ERROR = "error"  # no answer, or one that cannot be decoded
    SKIPPED = "skipped"


class Absent(Enum):
    """Stands for the element of an array that one side lacks."""

    ABSENT = "absent"

    def __str__(self) -> str:
        return self.value


ABSENT = Absent.ABSENT
LATENCY, END_STATE = "latency", "end state"  # places of differences that are about a whole run


@dataclass(frozen=True, slots=True)
class Difference:
    """Two values that differ at a place of a response, or of a request in another version.

    place: ``responses[].partitions[].error_code``. keys: what stands in the brackets, the names of
    elements: ``("orders", "3")``. captured, answered: values of messages, `ABSENT` for an element
    that one side lacks. is_secret: the values are secrets, which `output.text` hides.
    About a whole run: place is `LATENCY` or `END_STATE`, and keys has its subject: an API,
    ``log orders-0``, ``config retention.ms of orders`` and the like.
    rule: the name of the rule that tolerates it, "" if none does. note: what it means, or "".
    """

    place: str
    keys: tuple[str, ...]
    captured: Any
    answered: Any
    rule: str = ""
    note: str = ""
    is_secret: bool = False

    @property
    def path(self) -> str:
        """The place with its keys: ``responses[orders].partitions[3].error_code``."""
        first, *rest = self.place.split("[]")
        keys = (*self.keys, *("" for _ in rest))
        return first + "".join(f"[{key}]{part}" for key, part in zip(keys, rest, strict=False))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of comparing one answer: a verdict, and the differences that led to it."""

    verdict: Verdict = Verdict.SAME
    differences: list[Difference] = field(default_factory=list)
    reason: str = ""

    def with_differences(self, differences: list[Difference]) -> Judgement:
        """Another judgement of the same answer, with the verdict that follows from these."""
        verdict = Verdict.TOLERATED if differences else Verdict.SAME
        if not all(each.rule for each in differences):
            verdict = Verdict.DIFFERENT
        return replace(self, verdict=verdict, differences=differences)


@dataclass(slots=True)
class Attempt:
    """A request as it went over a connection, and its response.

    A step has several if the target was not ready, or if several nodes got a part of the request.
    Members of groups have others between two steps. A Produce with acks 0 has an ApiVersions
    behind it.

    answer: empty if none came. reason: why the answer was not final, so that the request was sent
    again.
    """

    sent: bytes
    sent_ns: int
    answer: bytes = b""
    answered_ns: int = -1
    reason: str = ""


@dataclass(slots=True)
class Outcome:
    """A step after the run.

    sent: the frame as it went out; answer: the frame that came. sent_ns, answered_ns: nanoseconds
    since the run's start; lag_ns: behind its schedule; own_lag_ns: how long it could have been sent
    but was not; -1 if it was not timed. error: why there is no answer, or "".
    is_racing: as of the step, but in this run only: the session of a member may have run out.
    node_id: of the target. api_version: in which it was sent.
    dropped: captured fields, not at their default, that the request lacks in that version.
    earlier: answers that were not final. followed: heartbeats of the replay's own that its member
    sent after this one.
    """

    step: Step
    sent: bytes | None = None
    answer: bytes | None = None
    sent_ns: int = -1
    answered_ns: int = -1
    lag_ns: int = 0
    own_lag_ns: int = -1
    node_id: int | None = None
    api_version: int = -1
    dropped: Sequence[Difference] = ()
    earlier: Sequence[Attempt] = ()
    followed: Sequence[Attempt] = ()
    error: str = ""
    is_racing: bool = False
    skipped: Skipped | None = None
    judgement: Judgement = Judgement()

    @property
    def latency_ns(self) -> int:
        return self.answered_ns - self.sent_ns if self.answered_ns >= 0 else -1


def tolerate(outcomes: Iterable[Outcome], allowed: Callable[[str, Difference], Difference]) -> None:
    """Give rules to differences of outcomes that have none. allowed: takes the name of the API."""
    for outcome in outcomes:
        judgement, name = outcome.judgement, outcome.step.api_name
        if judgement.verdict is Verdict.DIFFERENT and judgement.differences:
            outcome.judgement = judgement.with_differences(
                [each if each.rule else allowed(name, each) for each in judgement.differences]
            )


class Reply(NamedTuple):
    """A request as it was sent once, and its answer, decoded: by the target's names.

    answer: None if there is none.
    """

    step: Step
    node_id: int | None
    sent_ns: int
    answered_ns: int
    request: dict[str, Any]
    answer: dict[str, Any] | None

    @property
    def body(self) -> dict[str, Any]:
        """The answer, empty without one."""
        return self.answer or {}

    @property
    def is_trial(self) -> bool:
        """Return whether the request changes nothing."""
        return bool(self.request.get("validate_only"))

    @property
    def end_ns(self) -> int:
        """When it was answered, far away if it was not."""
        return FOREVER_NS if self.answer is None else self.answered_ns

    @property
    def taken(self) -> dict[str, Any]:
        """The answer, if it has no error; else nothing."""
        return {} if self.body.get("error_code") else self.body

    def wrong(self, one: Difference) -> Contradiction:
        return self.step.number, one


Contradiction = tuple[int, Difference]  # the step whose answer is wrong
