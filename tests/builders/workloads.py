"""Workloads and plans of a replay, from messages."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from kdissect.codec.message import Message, encode_message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay import model
from kdissect.replay.planning.plan import make_plan
from tests.builders.messages import a_request, a_response, numbered_batch

MS = 1_000_000


def planned(*exchanges: model.Exchange) -> model.ReplayPlan:
    """A plan that sends all of these, each on its connection."""
    connections: dict[int, list[model.Exchange]] = {}
    for each in exchanges:
        connections.setdefault(each.connection, []).append(each)
    options = model.PlanOptions(allow=frozenset(model.WRITING_CLASSES))
    return make_plan(workload(*connections.values()), options)


def call(
    api_key: int, api_version: int, at_ms: int, connection: int = 0, told: Any = None, **body: Any
) -> model.Exchange:
    """A request with a response after a millisecond."""
    answer = a_response(api_key, api_version, **(told or {}))
    request = a_request(api_key, api_version, **body)
    return exchange(connection, request, at_ms, at_ms + 1, answer)


def produce(*partitions: int, acks: int = -1, count: int = 1) -> Message:
    records = numbered_batch(0, count)
    data = [{"index": each, "records": records} for each in partitions]
    topics = [{"name": "t", "partition_data": data}]
    return a_request(ApiKey.PRODUCE, 9, acks=acks, timeout_ms=5, topic_data=topics)


def produced(*results: int, codes: Sequence[int] = ()) -> Message:
    """results: a partition, its base offset, another partition and so on. codes: of errors."""
    entries = [
        {"index": index, "error_code": code, "base_offset": offset}
        for index, offset, code in zip_longest(results[::2], results[1::2], codes, fillvalue=0)
    ]
    return a_response(ApiKey.PRODUCE, 9, responses=[{"name": "t", "partition_responses": entries}])


def fetch(partition: int) -> Message:
    asked = {"partition": partition, "fetch_offset": 0, "partition_max_bytes": 9}
    topics = [{"topic": "t", "partitions": [asked]}]
    return a_request(ApiKey.FETCH, 12, max_wait_ms=5, min_bytes=1, topics=topics)


def fetched(partition: int, records: bytes = b"") -> Message:
    entry = {"partition_index": partition, "high_watermark": 0, "records": records}
    return a_response(ApiKey.FETCH, 12, responses=[{"topic": "t", "partitions": [entry]}])


def heartbeat() -> Message:
    return a_request(ApiKey.HEARTBEAT, 4, group_id="g", generation_id=1, member_id="m")


def metadata() -> Message:
    return a_request(ApiKey.METADATA, 9, topics=None)


ANSWERS = {
    ApiKey.HEARTBEAT: a_response(ApiKey.HEARTBEAT, 4, error_code=0),
    ApiKey.METADATA: a_response(ApiKey.METADATA, 9, brokers=[], topics=[]),
}


def exchange(
    connection: int, request: Message, sent_ms: int, seen_ms: int, answer: Message | None
) -> model.Exchange:
    """An exchange with its times in milliseconds; without a response time it has no response."""
    return model.Exchange(
        exchange_id=1000 * connection + sent_ms,
        connection=connection,
        index=-1,
        api_key=request.api_key,
        api_version=request.api_version,
        client_id="c",
        request=encode_message(request),
        response=None if answer is None else encode_message(answer),
        request_time_ns=sent_ms * MS,
        request_end_time_ns=sent_ms * MS,
        response_time_ns=-1 if answer is None else seen_ms * MS,
        response_end_time_ns=-1 if answer is None else seen_ms * MS,
        expects_response=request.body.get("acks") != 0,
    )


def workload(*connections: list[model.Exchange]) -> model.Workload:
    made = []
    for number, exchanges in enumerate(connections):
        for index, each in enumerate(exchanges):
            each.connection, each.index = number, index
        made.append(model.Connection(number, ("c", number), ("b", 9092), exchanges=exchanges))
    return model.Workload("test", "capture", made, model.WorkloadFacts())


def step_of(plan: model.ReplayPlan, one: model.Exchange) -> model.Step:
    return next(step for step in plan.steps if step.exchange is one)


def time_of_first_records(workload: model.Workload) -> int:
    """The time of the first Fetch that brings records: the capture has produced them before."""
    return min(
        each.request_time_ns
        for each in workload.exchanges()
        if each.api_key == ApiKey.FETCH
        and b"\x02" in (each.response or b"")
        and len(each.response or b"") > 200
    )
