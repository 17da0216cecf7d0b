"""Events of producers from decoded messages.

Array operations make all but the partitions and offsets that a client adds to its transaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Ints, Rows
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.stories.events import PRODUCER_EVENT, EventKind, event_table, flattened, place
from kdissect.tables.message_chunk import MessageChunk
from kdissect.tables.message_marks import first_match
from kdissect.tables.records import FROM_PRODUCE
from kdissect.tables.schemas import Row

_ONE_ROW = {
    ApiKey.ADD_OFFSETS_TO_TXN: EventKind.ADD_OFFSETS,
    ApiKey.TXN_OFFSET_COMMIT: EventKind.OFFSETS,
    ApiKey.END_TXN: EventKind.END,
}


def producer_events(messages: MessageChunk) -> Iterator[pa.Table]:
    """PRODUCER_EVENT of all APIs except Produce."""
    yield from _init(messages)
    for api_key, step in _ONE_ROW.items():
        yield from _one_row(messages, api_key, step)
    yield from _add_partitions(messages)
    yield from _markers(messages)


def produce_events(
    messages: MessageChunk, sets: Rows, source: Ints, raw: pa.Table, shown: pa.Table
) -> Iterator[pa.Table]:
    """PRODUCER_EVENT of the produced batches with a producer id.

    sets: PARTITION_MARK rows of the record sets. source: index into `records.SOURCES` of each. raw:
    rows of BATCHES. shown: their rows of `record_batches`.
    """
    at = raw["set_index"].to_numpy()
    has_producer = shown["producer_id"].fill_null(-1).to_numpy() >= 0
    chosen = np.flatnonzero(has_producer & (source[at] == FROM_PRODUCE))
    if not len(chosen):
        return
    some, at = shown.take(pa.array(chosen)), at[chosen]
    rows = sets["row"][at]
    requests, body = messages.requests(ApiKey.PRODUCE)
    assert body is not None  # each batch comes from such a request
    errors = messages.marks.by_partition(Role.ERROR_CODE)
    error = np.append(errors["value"], 0)[first_match(sets[at], errors)]  # -1 is the last
    delta = pc.fill_null(pc.subtract(some["last_offset"], some["base_offset"]), 0).to_numpy()
    request = messages.exchanges["request"][rows]
    in_frame = raw["pos"].to_numpy()[chosen] - messages.frames.start[rows, REQUEST]
    names = ("producer_id", "producer_epoch", "base_sequence", "record_count", "size")
    yield event_table(
        "producers",
        **place(messages, rows, some["batch_index"].to_numpy()),
        **{name: some[name].fill_null(-1) for name in names},
        step=_constant(EventKind.PRODUCE, len(rows)),
        transactional_id=body.field("transactional_id").take(
            pa.array(np.searchsorted(requests, rows))
        ),
        topic=pc.coalesce(*(some[name].cast(pa.string()) for name in ("topic", "topic_id"))),
        partition=some["partition"],
        error_code=pa.array(error.astype(np.int16), mask=~messages.answered(ApiKey.PRODUCE, rows)),
        flag=some["is_transactional"].fill_null(False),
        sequence_count=pa.array(np.clip(delta + 1, 1, 2**31 - 1)),
        capture_id=pa.array(messages.capture_id(REQUEST)[rows]),
        packet=pa.array(np.ascontiguousarray(request["packet"])),
        batch_pos=pa.array(request["pos"] + 4 + in_frame),
    )


def _constant(step: EventKind, count: int) -> pa.Array:
    return pa.array(np.full(count, int(step), np.int8))


def _init(messages: MessageChunk) -> Iterator[pa.Table]:
    """InitProducerId requests that returned an id; a refused one says nothing about a producer."""
    rows = messages.rows(ApiKey.INIT_PRODUCER_ID)
    if not len(rows):
        return
    rows = rows[messages.answered(ApiKey.INIT_PRODUCER_ID, rows) & (messages.error_code[rows] == 0)]
    request = messages.body(ApiKey.INIT_PRODUCER_ID, REQUEST, rows)
    response = messages.body(ApiKey.INIT_PRODUCER_ID, RESPONSE, rows)
    if not len(rows):
        return
    own = pc.fill_null(pc.equal(request.field("producer_id"), response.field("producer_id")), False)
    yield event_table(
        "producers",
        **place(messages, rows),
        producer_id=response.field("producer_id"),
        producer_epoch=response.field("producer_epoch"),
        step=_constant(EventKind.INIT, len(rows)),
        transactional_id=request.field("transactional_id"),
        error_code=messages.errors(ApiKey.INIT_PRODUCER_ID, rows),
        flag=own,
    )


def _one_row(messages: MessageChunk, api_key: int, step: EventKind) -> Iterator[pa.Table]:
    rows, body = messages.requests(api_key)
    if body is None:
        return
    flag = body.field("committed") if step is EventKind.END else pa.nulls(len(rows), pa.bool_())
    data = pa.nulls(len(rows), pa.string())
    if step is EventKind.OFFSETS:
        data = _offsets(body.to_pylist(), messages.values(api_key, RESPONSE, rows))
    yield event_table(
        "producers",
        **place(messages, rows),
        producer_id=body.field("producer_id"),
        producer_epoch=body.field("producer_epoch"),
        step=_constant(step, len(rows)),
        transactional_id=body.field("transactional_id"),
        error_code=messages.errors(api_key, rows),
        flag=flag,
        data=data,
    )


def _offsets(requests: list[Row], responses: list[Row | None]) -> pa.Array:
    """Return JSON of the offsets that the responses of TxnOffsetCommit accepted."""
    offset_texts = []
    for request, response in zip(requests, responses, strict=True):
        refused = {
            (topic["name"], partition["partition_index"])
            for topic in (response and response["topics"]) or ()
            for partition in topic["partitions"] or ()
            if partition["error_code"]
        }
        offsets = [
            (request["group_id"], topic["name"], partition["partition_index"], offset)
            for topic in request["topics"] or ()
            for partition in topic["partitions"] or ()
            if (topic["name"], partition["partition_index"]) not in refused
            and (offset := partition["committed_offset"]) is not None
        ]
        offset_texts.append(json.dumps(offsets))
    return pa.array(offset_texts, pa.string())


def _add_partitions(messages: MessageChunk) -> Iterator[pa.Table]:
    """One event per requested partition, with the result for that partition."""
    api_key = ApiKey.ADD_PARTITIONS_TO_TXN
    rows, body = messages.requests(api_key)
    if body is None:
        return
    answers = messages.values(api_key, RESPONSE, rows)
    whole = messages.errors(api_key, rows).to_pylist()
    picked: list[int] = []
    order: list[int] = []
    added: list[Row] = []
    for at, (request, answer) in enumerate(zip(body.to_pylist(), answers, strict=True)):
        errors = _partition_errors(answer)
        for number, event in enumerate(_added(request)):
            # version 4 and later can refuse the request as a whole
            event["error_code"] = errors.get(event.pop("key"), whole[at])
            picked.append(at)
            order.append(number)
            added.append(event)
    if added:
        kinds = {column.name: column.type for column in PRODUCER_EVENT}
        columns = {
            name: pa.array([event[name] for event in added], kinds[name]) for name in added[0]
        }
        where = place(messages, rows[np.array(picked, np.int64)], np.array(order, np.int64))
        yield event_table("producers", **where, **columns)


def _added(request: Row) -> Iterator[Row]:
    """Yield the partitions of a request, each with its `key` in the response."""
    old = {
        name: request[f"v3_and_below_{name}"]
        for name in ("transactional_id", "producer_id", "producer_epoch", "topics")
    }
    for transaction in (old, *(request["transactions"] or ())):
        is_asked = transaction.get("verify_only")
        ident = "" if transaction is old else transaction["transactional_id"]
        for topic in transaction["topics"] or ():
            for partition in topic["partitions"] or ():
                yield {
                    "producer_id": transaction["producer_id"],
                    "producer_epoch": transaction["producer_epoch"],
                    "step": int(EventKind.VERIFY if is_asked else EventKind.ADD),
                    "transactional_id": transaction["transactional_id"],
                    "topic": topic["name"],
                    "partition": partition,
                    "key": (ident, topic["name"], partition),
                }


def _partition_errors(answer: Row | None) -> dict[tuple[str, str, int], int]:
    """(transactional id, topic, partition) -> error of a response; no id before version 4."""
    if answer is None:
        return {}
    results = [("", answer["results_by_topic_v3_and_below"])]
    for result in answer["results_by_transaction"] or ():
        results.append((result["transactional_id"], result["topic_results"]))
    return {
        (ident, topic["name"], partition["partition_index"]): partition["partition_error_code"]
        for ident, topics in results
        for topic in topics or ()
        for partition in topic["results_by_partition"] or ()
    }


def _markers(messages: MessageChunk) -> Iterator[pa.Table]:
    """One event per partition on which a coordinator ends a transaction."""
    rows, body = messages.requests(ApiKey.WRITE_TXN_MARKERS)
    if body is None:
        return
    markers, row = flattened(body.field("markers"))
    topics, in_marker = flattened(markers.field("topics"))
    partitions, in_topic = flattened(topics.field("partition_indexes"))
    if not len(partitions):
        return
    via = pa.array(in_marker[in_topic])
    yield event_table(
        "producers",
        **place(messages, rows[row[in_marker[in_topic]]], np.arange(len(partitions))),
        producer_id=markers.field("producer_id").take(via),
        producer_epoch=markers.field("producer_epoch").take(via),
        step=_constant(EventKind.MARKER, len(partitions)),
        topic=topics.field("name").take(pa.array(in_topic)),
        partition=partitions,
        error_code=messages.errors(ApiKey.WRITE_TXN_MARKERS, rows[row[in_marker[in_topic]]]),
        flag=markers.field("transaction_result").take(via),
    )
