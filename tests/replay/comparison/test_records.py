"""Records are compared by their offsets, in whichever answer they come."""

import pytest

from kdissect.codec.message import Message, encode_message
from kdissect.codec.record_encoder import encode_batch
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.judge import Judge, RunFacts
from kdissect.replay.comparison.logs import MANY, compare_records
from kdissect.replay.fields import built_in_fields
from kdissect.replay.model import Difference, Judgement, Outcome, Verdict
from tests.builders.messages import a_request, a_response, numbered_batch
from tests.builders.workloads import exchange
from tests.replay.comparison.made_run import Run
from tests.replay.made import translated

LOG = ("t", 0)


def batch(first: int, values: list[bytes], codec: str = "none", **more: object) -> bytes:
    records = [
        {"offset": first + at, "timestamp_ms": 100 + at, "key": b"k", "value": value,
         "headers": [{"key": "h", "value": b"1"}]}
        for at, value in enumerate(values)
    ]  # fmt: skip
    return encode_batch(records, codec=codec, **more)  # type: ignore[arg-type]


def found(
    *answers: tuple[bytes, bytes], shift: int = 0, silent: bytes = b"", end: int = MANY
) -> list[Difference]:
    """The differences of (captured, answered) records of log t-0. shift: of its offsets. end: of
    those that have to come."""
    run = Run()
    for _, answered in answers:
        run.fetch(1, 0, answered, 0)
    facts = RunFacts(run.ids(), run.outcomes).logs.of(LOG)
    facts.silent.append(silent)
    expected = [(step, captured) for step, (captured, _) in enumerate(answers)]
    compared = compare_records(facts, expected, lambda *at: at[-1] + shift, end)
    return [one for _, one in compared]


def test_records_are_compared_by_offset_across_batches() -> None:
    """Two batches then, one now: the same three records, but for what differs."""
    captured = batch(0, [b"a", b"b"]) + batch(2, [b"c"])
    assert found((captured, batch(10, [b"a", b"b"]) + batch(12, [b"c"])), shift=10) == []
    [one] = found((captured, batch(10, [b"a", b"B"]) + batch(12, [b"c"])), shift=10)
    assert one.path == "responses[t].partitions[0].records[offset 1].value"
    assert (one.captured, one.answered) == (b"b", b"B")


def test_how_batches_are_written() -> None:
    """Another compression, and times that the broker sets, are named once for a batch."""
    both = batch(0, [b"a", b"b"]), batch(0, [b"a", b"b"], "gzip", timestamp_type="LogAppendTime")
    form = [(each.place.rpartition(".")[2], each.captured, each.answered) for each in found(both)]
    assert form == [
        ("compression", "none", "gzip"),
        ("timestamp_type", "CreateTime", "LogAppendTime"),
    ]


def test_records_that_come_with_another_answer_are_no_difference() -> None:
    whole = batch(0, [b"a", b"b"])
    assert found((whole, b""), (b"", whole)) == []
    [lost] = found((whole, b""))
    assert (lost.captured, lost.note) == ("2 records from offset 0", "no answer brings them")
    assert found((whole, batch(0, [b"a"])), end=1) == []
    [changed] = found((whole, b""), (b"", batch(0, [b"a", b"X"])))
    assert (changed.path, changed.answered) == (
        "responses[t].partitions[0].records[offset 1].value",
        b"X",
    )


@pytest.mark.parametrize(
    ("answered", "known", "is_allowed"),
    [
        ([b"b", b"a", b"c"], [b"a", b"b", b"c"], True),
        ([b"b", b"a", b"c"], [b"a"], False),
        ([b"b", b"b", b"c"], [b"a", b"b", b"c"], False),
        ([b"b", b"X", b"c"], [b"a", b"b", b"c"], False),
    ],
)
def test_records_without_an_order(
    answered: list[bytes], known: list[bytes], is_allowed: bool
) -> None:
    """Of Produce requests with acks 0: the same records at other offsets, and no others."""
    both = batch(0, [b"a", b"b", b"c"]), batch(0, answered)
    rules = {each.rule for each in found(both, silent=batch(0, known))}
    assert rules == {"unacknowledged-order" if is_allowed else ""}


def test_offsets_of_a_topic_that_is_made_again() -> None:
    """The captured topic had records before the capture, so its offsets are others than at the
    target. Those of the next topic of its name are the same."""
    first, second = numbered_batch(0, 2), numbered_batch(50, 2)

    def at(offset: int, data: bytes) -> bytes:
        return offset.to_bytes(8, "big") + data[8:]

    def produced(data: bytes, *bases: int) -> tuple[Message, Message, Message]:
        """A request, its captured response and the answer, with these base offsets."""
        topic = {"name": "t", "partition_data": [{"index": 0, "records": data}]}
        request = a_request(ApiKey.PRODUCE, 9, acks=-1, topic_data=[topic])
        one, other = (
            a_response(ApiKey.PRODUCE, 9, responses=[{"name": "t", "partition_responses": [
                {"index": 0, "base_offset": base, "log_start_offset": base}]}])
            for base in bases
        )  # fmt: skip
        return request, one, other

    def fetched(data: bytes, *bases: int) -> tuple[Message, Message, Message]:
        asked = {"partition": 0, "fetch_offset": bases[0], "partition_max_bytes": 1 << 20}
        topics = [{"topic": "t", "partitions": [asked]}]
        request = a_request(ApiKey.FETCH, 11, session_epoch=-1, max_bytes=1 << 20, topics=topics)
        one, other = (
            a_response(ApiKey.FETCH, 11, responses=[{"topic": "t", "partitions": [
                {"partition_index": 0, "high_watermark": base + 2, "log_start_offset": base,
                 "last_stable_offset": base + 2, "records": at(base, data)}]}])
            for base in bases
        )  # fmt: skip
        return request, one, other

    deleted = a_response(ApiKey.DELETE_TOPICS, 5, responses=[{"name": "t"}])
    made = a_response(ApiKey.CREATE_TOPICS, 6, topics=[{"name": "t"}])
    exchanges = [
        produced(first, 1000, 0),
        fetched(first, 1000, 0),
        (a_request(ApiKey.DELETE_TOPICS, 5, topic_names=["t"]), deleted, deleted),
        (a_request(ApiKey.CREATE_TOPICS, 6, topics=[{"name": "t"}]), made, made),
        produced(second, 0, 0),
        fetched(second, 0, 0),
    ]
    translator, steps = translated(
        *(exchange(0, request, 10 * number, 10 * number + 1, captured)
          for number, (request, captured, _) in enumerate(exchanges))
    )  # fmt: skip
    outcomes = []
    for step, (_, _, answer) in zip(steps, exchanges, strict=True):
        frame, sent = encode_message(answer), translator.request(step)
        assert isinstance(sent, bytes)
        translator.learn(step, frame)
        times = 10 * step.number, 10 * step.number + 1
        version = step.exchange.api_version
        outcomes.append(Outcome(step, sent, frame, *times, node_id=1, api_version=version))
    Judge(RunFacts(translator.ids, outcomes), built_in_fields()).judge()
    assert [each.judgement for each in outcomes] == [Judgement(Verdict.SAME)] * 6


@pytest.mark.parametrize(
    ("second", "lost"),
    [(b"second", []), (b"first", [(2, "value", b"second", b"first")])],
    ids=["right", "of the deleted topic"],
)
def test_records_of_a_topic_that_is_made_again(
    second: bytes, lost: list[tuple[int, str, bytes, bytes]]
) -> None:
    """Each Fetch is compared with the records of the topic that it was about, an answer that comes
    after the deletion included."""
    run = Run()
    deleted = {"responses": [{"name": "t", "error_code": 0}]}
    late = run.fetch(1, 0, batch(0, [b"first"]), 1)
    run.add(2, ApiKey.DELETE_TOPICS, 1, {"topic_names": ["t"]}, deleted)
    again = run.fetch(3, 0, batch(0, [second]), 1)
    run.outcomes[late].answered_ns = run.outcomes[again].answered_ns
    ids = run.ids()
    for number, value in ((late, b"first"), (again, b"second")):
        outcome = run.outcomes[number]
        answer = run.fetch(0, 0, batch(0, [value]), 1)
        outcome.step.exchange.response = run.outcomes.pop(answer).answer
    Judge(RunFacts(ids, run.outcomes), built_in_fields()).judge()
    found = [
        (each.step.number, one.place.rpartition(".")[2], one.captured, one.answered)
        for each in run.outcomes
        for one in each.judgement.differences
    ]
    assert found == lost
