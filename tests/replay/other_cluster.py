"""A simulated target: the captured brokers' responses, as another cluster would send them.

Every id of the capture has a counterpart by a plain rule (producer ids count from 1000 on, nodes
are 100 higher, and so on). `moved` gives a captured frame in the terms of that cluster, requests
and responses alike, so that what a translation should send, and what it should take for the same,
is known of every exchange without a broker. A list that was written by hand says which fields hold
ids (`tests/oracles/message_fields.py`).
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from kdissect.codec.message import Message, encode_message
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay import model
from kdissect.replay.batches import headers, patch_producer
from kdissect.replay.comparison.judge import Judge, RunFacts
from kdissect.replay.fields import built_in_fields, load_fields
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.translator import Translator
from kdissect.replay.workload.messages import request_of, response_of
from tests.oracles.message_fields import FIELDS, holders

ZERO = UUID(int=0)
HEARTBEATS = (
    ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.SHARE_GROUP_HEARTBEAT, ApiKey.STREAMS_GROUP_HEARTBEAT,
)  # fmt: skip
# What is added to the capture's values.
ADDED = {
    "partition": 0, "node": 100, "producer-id": 1000, "producer-epoch": 3, "leader-epoch": 7,
    "generation": 10, "group-epoch": 10, "endpoint-epoch": 20, "session": 5,
}  # fmt: skip


def everything() -> model.PlanOptions:
    return model.PlanOptions(allow=frozenset(model.WRITING_CLASSES))


@dataclass
class OtherCluster:
    """offset: what is added to the capture's. is_moved: False for a twin that calls everything as
    the capture does. renames: of topics, groups and transactional ids.
    """

    workload: model.Workload
    offset: int = 0
    is_moved: bool = True
    renames: dict[str, str] = field(default_factory=dict)
    coordinator_members: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Which ids the captured brokers gave: the others are the clients' own."""
        for exchange in self.workload.exchanges():
            request, response = request_of(exchange), response_of(exchange)
            if request is None or response is None:
                continue
            if exchange.api_key == ApiKey.JOIN_GROUP and response.body["member_id"]:
                self.coordinator_members.add(response.body["member_id"])
            if exchange.api_key in HEARTBEATS and not request.body["member_id"]:
                self.coordinator_members.add(response.body["member_id"] or "")

    # -- single values --------------------------------------------------------------------------

    def name(self, value: str) -> str:
        return self.renames.get(value, value)

    def topic_id(self, value: UUID) -> UUID:
        known = any(str(value) in topic.topic_ids for topic in self.workload.facts.topics.values())
        if value == ZERO or not known:
            return value
        return UUID(int=value.int ^ (0xABCDEF << 40))

    def member(self, value: str) -> str:
        return f"other-{value}" if value in self.coordinator_members else value

    def node(self, value: int) -> int:
        """A number that no broker has stays: an answer may say 0 where nothing is to be said."""
        return value + ADDED["node"] if value in self.workload.facts.brokers else value

    def resource(self, kind: str, resource_type: int, value: str) -> str:
        """ConfigResource.Type and ResourceType of Kafka's clients, by their numbers."""
        if kind == "config-resource" and resource_type in (4, 8) and value.isdigit():
            return str(self.node(int(value)))  # BROKER, BROKER_LOGGER; "": all of them
        is_name = resource_type in ((2, 32) if kind == "config-resource" else (2, 3, 5))
        return self.name(value) if is_name else value

    def value(self, kind: str, value: Any) -> Any:
        """One value; counts stay below 0, since others have another meaning."""
        if value is None:
            return None
        if kind in ("topic", "group", "transactional-id", "coordinator-key"):
            return self.name(value)
        if kind == "topic-id":
            return self.topic_id(value)
        if kind == "member":
            return self.member(value)
        if kind == "node":
            return self.node(value)
        if kind == "token":
            return _other_token(value)
        if kind in ("subscription", "assignment"):
            for old, new in self.renames.items():
                value = value.replace(_string(old), _string(new))
            return value
        if kind in ("generation", "group-epoch", "session"):
            return value + ADDED[kind] if value > 0 else value
        return value + self.added(kind) if value >= 0 else value

    def added(self, kind: str) -> int:
        return self.offset if kind == "offset" else ADDED[kind]

    # -- messages -------------------------------------------------------------------------------

    def moved(self, message: Message) -> Message:
        """A copy of the message in the terms of this cluster."""
        message = copy.deepcopy(message)
        if not self.is_moved:
            return message
        api_name = catalog.api(message.api_key).name
        for path, kind in FIELDS[api_name, message.side].items():
            for holder, name in holders(message.body, path):
                holder[name] = self.moved_value(kind, holder, holder[name], message.side)
        return message

    def moved_value(self, kind: str, holder: dict[str, Any], value: Any, side: str) -> Any:
        if isinstance(value, list):
            return [self.value(kind, each) for each in value]
        if kind == "records":
            return self.records(value, side)
        if kind in ("config-resource", "acl-resource") and value is not None:
            number = holder.get("resource_type", holder.get("resource_type_filter"))
            return self.resource(kind, number, value)
        return self.value(kind, value)

    def records(self, data: bytes | None, side: str) -> bytes | None:
        if not data:
            return data
        out = bytearray(data)
        for header in headers(data):
            if header.magic != 2 or header.is_partial:
                continue
            if header.producer_id >= 0:
                patch_producer(
                    out, header, header.producer_id + 1000, header.producer_epoch + 3,
                    header.base_sequence,
                )  # fmt: skip
            if side == "response":
                shifted = header.base_offset + self.offset
                out[header.pos : header.pos + 8] = shifted.to_bytes(8, "big")
        return bytes(out)

    def metadata(self) -> dict[str, Any]:
        """What this cluster's Metadata would say before the replay: brokers, and the topics that
        the capture does not make."""
        brokers = [
            {"node_id": self.node(node) if self.is_moved else node, "host": host,
             "port": port, "rack": None}
            for node, (host, port) in self.workload.facts.brokers.items()
        ]  # fmt: skip
        return {"brokers": brokers, "topics": []}


def _string(text: str) -> bytes:
    """As it stands in messages."""
    return len(text).to_bytes(2, "big") + text.encode()


def _other_token(value: Any) -> Any:
    """Another token of the same length; None for None."""
    if not value or value == ZERO:
        return value
    if isinstance(value, UUID):
        return UUID(int=value.int ^ 0xABCDEF)
    return value + 1000 if isinstance(value, int) else value[:-1] + value[:1]


def events(plan: model.ReplayPlan) -> Iterator[tuple[bool, model.Step]]:
    """(is the request sent, step) in the order of the capture."""
    found: list[tuple[int, int, int]] = []
    start_ns = plan.steps[0].exchange.request_time_ns
    for step in plan.steps:
        if step.skipped is not None:
            continue
        found.append((step.at_ns, 1, step.number))
        exchange = step.exchange
        if exchange.response is not None:
            at_ns = exchange.response_end_time_ns - start_ns
            found.append((max(step.at_ns + 1, at_ns), 0, step.number))
    for _, kind, number in sorted(found):
        yield kind == 1, plan.steps[number]


@dataclass
class Replayed:
    """What came of a replay against an `OtherCluster`."""

    plan: model.ReplayPlan
    translator: Translator
    judge: Judge | None = None
    outcomes: list[model.Outcome] = field(default_factory=list)
    sent: dict[int, bytes | model.Skipped] = field(default_factory=dict)
    judgements: dict[int, model.Judgement] = field(default_factory=dict)
    unready: list[str] = field(default_factory=list)

    def verdicts(self) -> Counter[str]:
        return Counter(each.verdict.value for each in self.judgements.values())


def replay(
    workload: model.Workload,
    cluster: OtherCluster,
    *,
    plan: model.ReplayPlan | None = None,
    options: model.TranslateOptions | None = None,
    rules: Sequence[str] = (),
    flip: Any = None,
) -> Replayed:
    """Send every request to the made-up cluster, in the captured order.

    plan: of the workload, if several replays share it. flip(step, message) may change an answer,
    like a proxy between.
    """
    plan = plan or make_plan(workload, everything())
    ids = IdMap(plan, options)
    translator = Translator(ids)
    translator.ids.target.learn_metadata(cluster.metadata())
    done = Replayed(plan, translator)
    start_ns = plan.steps[0].exchange.request_time_ns
    for is_request, step in events(plan):
        if is_request:
            done.sent[step.number] = translator.request(step)
            continue
        captured = response_of(step.exchange)
        if isinstance(done.sent[step.number], model.Skipped):
            translator.failed(step)
            outcome = model.Outcome(step, skipped=done.sent[step.number])  # type: ignore[arg-type]
        else:
            answer = step.exchange.response
            assert answer is not None
            if captured is not None:
                moved = cluster.moved(captured)
                if step.exchange.api_key == ApiKey.FETCH and "session_id" in moved.body:
                    moved.body["session_id"] = 0  # none is asked for
                if flip is not None:
                    flip(step, moved)
                answer = encode_message(moved)
            unready = translator.unready(step, answer)
            done.unready += [f"{step.api_name}: {why}" for why in unready.values()]
            translator.learn(step, answer)
            outcome = model.Outcome(
                step, sent=done.sent[step.number], answer=answer, sent_ns=step.at_ns,  # type: ignore[arg-type]
                api_version=step.exchange.api_version,
                node_id=workload.connections[step.connection].node_id,
                answered_ns=max(
                    step.at_ns + 1, step.exchange.response_end_time_ns - start_ns
                ),
            )  # fmt: skip
        done.outcomes.append(outcome)
    fields = load_fields(list(rules)) if rules else built_in_fields()  # with the shapes of before
    done.judge = Judge(RunFacts(ids, done.outcomes), fields)
    done.judge.judge()
    for outcome in done.outcomes:
        done.judgements[outcome.step.number] = outcome.judgement
    return done


def expected(cluster: OtherCluster, exchange: model.Exchange) -> bytes | None:
    """The request as it should reach the made-up cluster."""
    request = request_of(exchange)
    return None if request is None else encode_message(cluster.moved(request))
