"""The fast path sends the same bytes and learns the same ids as `Translator` alone."""

import random
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.codec.message_codec import UNKNOWN_TAGS
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
from kdissect.replay.translation import fast_path, requests
from kdissect.replay.translation.fast_path import (
    FastTranslator,
    Form,
    FormLeaf,
    Forms,
    form_of,
    patch,
)
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.producers import Producer
from kdissect.replay.translation.translator import Translator
from kdissect.replay.workload.field_kinds import FieldKind, iter_fields
from kdissect.replay.workload.source import load_workload
from tests.codec.message_values import sample, to_json
from tests.replay.other_cluster import OtherCluster, Replayed, replay
from tests.truth.material import CAPTURES, needs_material

SHIPPED = [
    *("librdkafka.pcap", "java_2_0_1.pcap"),
    pytest.param("sarama.pcap.gz", marks=pytest.mark.heavy),  # a plain client, as librdkafka
]
SHARED = [
    "transactions/transactions",  # the others are ordinary clients, as in the shipped captures
    pytest.param("perf/perf_tshark", marks=pytest.mark.heavy),
    pytest.param("other_clients/kafka_python", marks=pytest.mark.heavy),
]
HANDLED = (ApiKey.FETCH, ApiKey.METADATA, ApiKey.JOIN_GROUP, ApiKey.FIND_COORDINATOR)
BROKER = ("10.0.0.2", 9092)


def decoded(frame: bytes | Skipped) -> Any:
    """A decoded frame: patched ones may have another encoding of a length."""
    if isinstance(frame, Skipped):
        return frame
    try:
        return decode_message(frame, side="request")
    except ValueError:
        return frame


def same(fast: Replayed, plain: Replayed) -> None:
    assert fast.sent.keys() == plain.sent.keys()
    for number, frame in fast.sent.items():
        assert decoded(frame) == decoded(plain.sent[number]), fast.plan.steps[number].api_name
    assert fast.judgements == plain.judgements
    assert fast.retried == plain.retried
    retries, plain_retries = fast.translator.retries, plain.translator.retries
    assert retries.attempts == plain_retries.attempts
    assert retries.futile == plain_retries.futile
    mine, theirs = fast.translator.ids, plain.translator.ids
    for name in ("topic_ids", "expected", "opaque", "share_epochs"):
        assert getattr(mine, name) == getattr(theirs, name), name
    for name in ("offsets", "producers", "groups", "target"):
        assert vars(getattr(mine, name)) == vars(getattr(theirs, name)), name
    for ids in (mine, theirs):
        for session in ids.sessions._sessions.values():
            assert session.partitions is not None  # reads what was left for later
    assert repr(vars(mine.sessions)) == repr(vars(theirs.sessions))


def check(path: Path) -> None:
    found = load_workload(str(path))
    for is_moved in (True, False):
        done = []
        for is_fast in (True, False):
            cluster = OtherCluster(found)
            cluster.is_moved = is_moved
            done.append(replay(found, cluster, is_fast=is_fast))
        same(*done)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_captures_are_sent_as_on_the_plain_path(captures: Path, name: str) -> None:
    """Requests and learned ids of a whole capture are equal."""
    check(captures / name)


@pytest.mark.parametrize("name", SHARED)
@needs_material
def test_recorded_captures_are_sent_as_on_the_plain_path(name: str) -> None:
    """The same for captures beside the project."""
    check(CAPTURES / f"{name}.pcap")


def untagged(value: Any) -> Any:
    """The message without unknown tagged fields, which have no form."""
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
        for kind, slot, holder, _ in list(iter_fields(message)):
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

    def learn(self, ids: IdMap) -> None:
        """Learn some nodes, topics and partitions of the target."""
        nodes = [{"node_id": n, "host": "h", "port": 1} for n in (5, 6)]
        partitions = [
            {"partition_index": n, "leader_id": 5, "leader_epoch": 40 + n} for n in (0, 1, 7)
        ]
        topics = [
            {"name": name, "topic_id": UUID(int=n + 1), "error_code": 0, "partitions": partitions}
            for n, name in enumerate(list(self.topics.values())[:3])
        ]
        ids.target.learn_metadata({"brokers": nodes, "topics": topics})
        ids.producers.learn(Producer(0, 0), Producer(1000, 3))
        ids.producers.learn(Producer(1, 1), Producer(1001, 4))
        ids.groups._members["group-1", "member-1"] = "memberXX"  # as long
        ids.groups._members["group-1", "member-2"] = "another-1"  # longer
        ids.groups._generations["group-1", 7] = 70
        ids.groups._epochs["group-2", "member-1", 7] = 71
        ids.groups._last_epoch["group-2", "member-1"] = (1, 11)
        for name in self.topics.values():
            ids.offsets.produced((name, 1), 0, 100)
            ids.producers.lost(Producer(0, 0), (name, 0), 3)


@pytest.mark.parametrize("seeds", [[0], pytest.param([1, 2], marks=pytest.mark.heavy)])
@pytest.mark.parametrize("key", sorted(catalog.apis()))
def test_random_requests_of_every_version(key: int, seeds: list[int]) -> None:
    """Made requests of each version, with and without writes allowed."""
    versions = catalog.api(key).request.versions
    used = 0
    for version in range(versions.first, versions.last + 1):
        for seed in seeds:
            world = World(key, version, seed)
            for allow in (frozenset(WRITING_CLASSES), frozenset()):
                plan = world.plan(allow)
                fast, counted = FastTranslator(IdMap(plan)), FastTranslator(IdMap(plan))
                plain = Translator(IdMap(plan))
                for each in (fast, plain, counted):
                    world.learn(each.ids)
                for step in plan.steps:
                    assert step.exchange.request is not None
                    try:
                        found = patch(counted.ids, step, step.exchange.request, 9)
                    except requests.Untranslatable:
                        found = None
                    used += found is not None
                    result = fast.request(step, 9)
                    assert decoded(result) == decoded(plain.request(step, 9)), (version, seed)
                    assert fast.target_node(step) == plain.target_node(step)
    if key not in requests.SPECIAL or key in HANDLED:
        assert used > 0


def test_renamed_and_reencoded_requests_are_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that change sizes take the plain path."""
    world = World(ApiKey.HEARTBEAT, 4, 1)
    plan = world.plan(frozenset())
    step = plan.steps[2]
    assert step.exchange.request is not None
    monkeypatch.setattr(fast_path, "patch", lambda *_: b"patched")
    assert FastTranslator(IdMap(plan)).request(step, 1) == b"patched"
    for options in (
        TranslateOptions(renames=(("group", "group-1", "group-9"),)),
        TranslateOptions(reencode=True),
    ):
        sent = FastTranslator(IdMap(plan, options)).request(step, 1)
        assert sent == Translator(IdMap(plan, options)).request(step, 1)


# -- forms --------------------------------------------------------------------------------------

ALL = [
    (key, version, side)
    for key, api in catalog.apis().items()
    for side in ("request", "response")
    for version in range(api.request.versions.first, api.request.versions.last + 1)
    if (key, side) != (18, "response")
]


def made(key: int, version: int, side: str, seed: int) -> bytes:
    body = sample(catalog.api(key).side(side), version, seed)
    return encode_message(Message(key, version, side, {"correlation_id": seed}, body))


def other_values(frame: bytes, form: Form, generator: random.Random) -> bytes:
    """A frame of the same form."""
    out = bytearray(frame)
    for leaf in form.leaves:
        if generator.random() < 0.7:
            out[leaf.pos : leaf.pos + leaf.size] = generator.randbytes(leaf.size)
    return bytes(out)


def filled(value: Any, values: list[Any]) -> Any:
    if isinstance(value, FormLeaf):
        return values[value.value_index]
    if isinstance(value, dict):
        return {name: filled(inner, values) for name, inner in value.items()}
    return [filled(each, values) for each in value] if isinstance(value, list) else value


def check_values(frame: bytes, form: Form) -> None:
    assert form.fits(int.from_bytes(frame))
    expected = decode_message(
        frame, side=form.side, api_key=form.api_key, api_version=form.api_version
    )
    assert to_json(filled(form.body, form.values(frame))) == to_json(expected.body)


def test_every_message_of_every_version() -> None:
    """A form finds the fields where the plain decoder finds them."""
    generator = random.Random(8)
    count = 0
    for key, version, side in ALL:
        for seed in range(3):
            frame = made(key, version, side, seed)
            try:
                form = Form(frame, side, key, version)
            except fast_path.NoForm:
                message = decode_message(frame, side=side, api_key=key, api_version=version)
                assert UNKNOWN_TAGS in repr(message)
                continue
            check_values(frame, form)
            check_values(other_values(frame, form, generator), form)
            count += 1
    assert count > 1500


@given(st.data())
def test_changed_bytes_fit_only_if_nothing_else_moves(data: st.DataObject) -> None:
    """A changed frame fits a form only with the same layout."""
    key, version, side = data.draw(st.sampled_from(ALL))
    frame = made(key, version, side, data.draw(st.integers(0, 5)))
    try:
        form = Form(frame, side, key, version)
    except fast_path.NoForm:
        return
    out = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 3))):
        out[data.draw(st.integers(0, len(out) - 1))] = data.draw(st.integers(0, 255))
    if form.fits(int.from_bytes(out)):
        check_values(bytes(out), form)


def test_the_second_frame_of_a_size_makes_a_form() -> None:
    """A form is made once, and for one version only."""
    known = Forms()
    frame = encode_message(Message(12, 4, "request", {"correlation_id": 1}, {"group_id": "g"}))
    assert known.of(frame, "request", 12, 4) is None
    form = known.of(frame, "request", 12, 4)
    assert form is not None
    assert known.of(frame[:4] + b"\0\0\0\7" + frame[8:], "request", 12, 4) is form
    assert known.of(frame, "request", 12, 3) is None


def test_faulty_and_large_frames_have_no_form() -> None:
    """Such frames take the plain path."""
    frame = encode_message(Message(12, 4, "request", {"correlation_id": 1}, {"group_id": "g"}))
    large = encode_message(Message(0, 9, "request", {}, {"transactional_id": "x" * 9000}))
    for _ in range(3):
        assert form_of(frame + b"!", "request", 12, 4) is None
        assert form_of(frame[:-2], "request", 12, 4) is None
        assert form_of(large, "request", 0, 9) is None
