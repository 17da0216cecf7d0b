"""What goes by forms is what decoding, translating and encoding makes, and learns the same."""

import random
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.codec.message_codec import UNKNOWN_TAGS
from kdissect.codec.message_forms import form_of
from kdissect.codec.record_codec import encode_batch
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import (
    WRITING_CLASSES,
    Connection,
    Exchange,
    PlanOptions,
    ReplayPlan,
    Skipped,
    Step,
    TopicFacts,
    TranslateOptions,
    Workload,
    WorkloadFacts,
)
from kdissect.replay.translation import shortcuts
from kdissect.replay.translation.producers import Producer
from kdissect.replay.translation.translator import Translator
from kdissect.replay.workload.field_kinds import FieldKind, spots
from kdissect.replay.workload.messages import request_of
from kdissect.replay.workload.source import load_workload
from tests.codec.message_values import sample
from tests.replay.other_cluster import OtherCluster, Replayed, replay
from tests.truth.material import CAPTURES, needs_material

SHIPPED = ["librdkafka.pcap", "java_2_0_1.pcap", "sarama.pcap.gz"]
SHARED = ["perf/perf_tshark", "transactions/transactions", "other_clients/kafka_python"]
HANDLED = (ApiKey.FETCH, ApiKey.METADATA, ApiKey.JOIN_GROUP, ApiKey.FIND_COORDINATOR)
BROKER = ("10.0.0.2", 9092)


def decoded(frame: bytes | Skipped) -> Any:
    """Compared by what it says: patched frames keep the captured way to write a length."""
    if isinstance(frame, Skipped):
        return frame
    try:
        return decode_message(frame, side="request")
    except ValueError:
        return frame


def same(quick: Replayed, plain: Replayed) -> None:
    assert quick.sent.keys() == plain.sent.keys()
    for number, frame in quick.sent.items():
        assert decoded(frame) == decoded(plain.sent[number]), quick.plan.steps[number].api_name
    assert quick.judgements == plain.judgements
    assert quick.retried == plain.retried
    for name in ("topic_ids", "expected", "opaque", "asked", "futile", "share_epochs"):
        assert getattr(quick.translator, name) == getattr(plain.translator, name), name
    for name in ("offsets", "producers", "groups"):
        mine, theirs = getattr(quick.translator, name), getattr(plain.translator, name)
        assert vars(mine) == vars(theirs), name
    for each in (quick, plain):
        for session in each.translator.sessions._sessions.values():
            assert session.told is not None  # read what was left for later
    mine, theirs = quick.translator.sessions, plain.translator.sessions
    assert repr(vars(mine)) == repr(vars(theirs))


def check(path: Path) -> None:
    found = load_workload(str(path))
    for is_moved in (True, False):
        done = []
        for is_quick in (True, False):
            cluster = OtherCluster(found)
            cluster.is_moved = is_moved
            done.append(replay(found, cluster, is_quick=is_quick))
        same(*done)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_captures(captures: Path, name: str) -> None:
    check(captures / name)


@pytest.mark.parametrize("name", SHARED)
@needs_material
def test_recorded_captures(name: str) -> None:
    check(CAPTURES / f"{name}.pcap")


def untagged(value: Any) -> Any:
    """Without fields that nobody knows: they have no form."""
    if isinstance(value, dict):
        return {name: untagged(it) for name, it in value.items() if name != UNKNOWN_TAGS}
    return [untagged(it) for it in value] if isinstance(value, list) else value


# -- random messages ----------------------------------------------------------------------------


class World:
    """Requests of one API and version with random values, and a target that knows some of them."""

    def __init__(self, key: int, version: int, seed: int) -> None:
        self.random = random.Random(f"{key} {version} {seed}")
        self.key, self.version = key, version
        self.members = [f"member-{n}" for n in range(4)]
        self.topics = {UUID(int=self.random.getrandbits(128)): f"topic-{n}" for n in range(5)}
        self.frames = [self.frame(seed) for seed in (1, 2, 2, 3, 3, 4)]

    def frame(self, seed: int) -> bytes:
        definition = catalog.api(self.key).request
        body = untagged(sample(definition, self.version, seed))
        message = Message(self.key, self.version, "request", {}, body)
        for kind, slot, holder, _ in list(spots(message)):
            value = holder[slot.name]
            holder[slot.name] = (
                [self.value(kind, each) for each in value]
                if isinstance(value, list)
                else self.value(kind, value)
            )
        if self.key == ApiKey.FETCH and self.version >= 7:
            epoch = self.random.choice((0, 1, 5, -1))
            message.body.update(session_id=self.random.choice((0, 7)), session_epoch=epoch)
        if "key_type" in message.body:
            message.body["key_type"] = self.random.choice((0, 1, 2))
        frame = encode_message(message)
        for _ in range(2):
            form_of(frame, "request", self.key, self.version)
        return frame

    def value(self, kind: FieldKind, value: Any) -> Any:
        chosen = self.random.choice
        if kind is FieldKind.TOPIC_ID:
            return chosen([*self.topics, UUID(int=0)])
        if kind is FieldKind.TOPIC:
            return chosen([*self.topics.values()])
        if kind is FieldKind.MEMBER:
            return chosen([*self.members, ""])
        if kind is FieldKind.GROUP:
            return chosen(["group-1", "group-2"])
        if kind is FieldKind.TRANSACTIONAL_ID:
            return "transaction"
        if kind is FieldKind.RECORDS:
            return self.records()
        if kind in (FieldKind.PRODUCER_ID, FieldKind.PRODUCER_EPOCH, FieldKind.NODE):
            return chosen((-1, 0, 1, 2))
        return chosen((-1, 0, 1, 7))

    def records(self) -> bytes:
        record = {"offset": 0, "timestamp_ms": 1, "key": b"k", "value": b"v", "headers": []}
        return b"".join(
            encode_batch(
                [record], base_offset=0, producer_id=self.random.choice((-1, 0, 1, 9)),
                producer_epoch=0, base_sequence=self.random.choice((0, 5)),
                is_transactional=self.random.random() < 0.2,
            )
            for _ in range(self.random.randrange(3))
        )  # fmt: skip

    def plan(self, allow: frozenset[str]) -> ReplayPlan:
        facts = WorkloadFacts(brokers={0: BROKER, 1: BROKER})
        for topic_id, name in list(self.topics.items())[:4]:
            facts.topics[name] = TopicFacts(name, [str(topic_id)])
        connection = Connection(0, 0, ("10.0.0.1", 1000), BROKER, 0, 1)
        steps = []
        for number, frame in enumerate(self.frames):
            exchange = Exchange(
                number, 0, number, self.key, self.version, 0, "c", frame, None, number, number
            )
            connection.exchanges.append(exchange)
            name = catalog.api(self.key).name
            steps.append(Step(number, 0, exchange, name, "read", number, True))
        workload = Workload("made", "capture", [connection], facts)
        return ReplayPlan(workload, PlanOptions(allow=allow), steps, [list(range(len(steps)))])

    def learn(self, t: Translator) -> None:
        """The same for translators that are made alike."""
        nodes = [{"node_id": n, "host": "h", "port": 1} for n in (5, 6)]
        partitions = [
            {"partition_index": n, "leader_id": 5, "leader_epoch": 40 + n} for n in (0, 1, 7)
        ]
        topics = [
            {"name": name, "topic_id": UUID(int=n + 1), "error_code": 0, "partitions": partitions}
            for n, name in enumerate(list(self.topics.values())[:3])
        ]
        t.learn_metadata({"brokers": nodes, "topics": topics})
        t.producers.learn(Producer(0, 0), Producer(1000, 3))
        t.producers.learn(Producer(1, 1), Producer(1001, 4))
        t.groups._members["group-1", "member-1"] = "memberXX"  # as long
        t.groups._members["group-1", "member-2"] = "another-1"  # longer
        t.groups._generations["group-1", 7] = 70
        t.groups._epochs["group-2", "member-1", 7] = 71
        t.groups._last_epoch["group-2", "member-1"] = (1, 11)
        for name in self.topics.values():
            t.offsets.produced((name, 1), 0, 100)
            t.producers.lost(Producer(0, 0), (name, 0), 3)


@pytest.mark.parametrize("key", sorted(catalog.apis()))
def test_random_requests_of_every_version(key: int) -> None:
    versions = catalog.api(key).request.versions
    used = 0
    for version in range(versions.first, versions.last + 1):
        for seed in range(3):
            world = World(key, version, seed)
            for allow in (frozenset(WRITING_CLASSES), frozenset()):
                plan = world.plan(allow)
                quick, plain, counted = (Translator(plan) for _ in range(3))
                plain.is_quick = False
                for each in (quick, plain, counted):
                    world.learn(each)
                for step in plan.steps:
                    assert step.exchange.request is not None
                    try:
                        found = shortcuts.patched(counted, step, step.exchange.request, 9)
                    except shortcuts.requests.Untranslatable:
                        found = None
                    used += found is not None
                    result = quick.request(step, 9)
                    assert decoded(result) == decoded(plain.request(step, 9)), (version, seed)
                    assert quick.target_node(step) == plain.target_node(step)
    if key not in shortcuts.requests.SPECIAL or key in HANDLED:
        assert used > 0


def test_renamed_and_reencoded_requests_are_left_to_the_definition() -> None:
    world = World(ApiKey.HEARTBEAT, 4, 1)
    plan = world.plan(frozenset())
    step = plan.steps[2]
    frame = step.exchange.request
    assert frame is not None
    assert request_of(step.exchange) is not None
    assert form_of(frame, "request", ApiKey.HEARTBEAT, 4) is not None
    for options in (
        TranslateOptions(renames=(("group", "group-1", "group-9"),)),
        TranslateOptions(reencode=True),
    ):
        assert shortcuts.patched(Translator(plan, options), step, frame, 1) is None
