"""Events of producers from decoded messages, with array operations only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.stories.events import ProducerStep, story
from kdissect.stories.messages import Messages, Rows, flattened

_ONE_ROW = {
    ApiKey.ADD_OFFSETS_TO_TXN: ProducerStep.ADD_OFFSETS,
    ApiKey.TXN_OFFSET_COMMIT: ProducerStep.OFFSETS,
    ApiKey.END_TXN: ProducerStep.END,
}


@dataclass(frozen=True, slots=True)
class ProducedBatches:
    """Batches of Produce requests with a producer id, one entry each.

    row: int64, of the chunk. answered, error_code: of the partition in the response. batch_pos:
    stream position. last_delta: last minus first offset of the batch.
    """

    row: Rows
    batch_index: Rows
    topic: pa.Array  # name, or id if the name is unknown
    partition: Rows
    answered: npt.NDArray[np.bool_]
    error_code: Rows
    producer_id: Rows
    producer_epoch: Rows
    base_sequence: Rows
    last_delta: Rows
    record_count: Rows
    is_transactional: npt.NDArray[np.bool_]
    batch_pos: Rows
    size: Rows


def producer_events(messages: Messages) -> Iterator[pa.Table]:
    """PRODUCER_STEPS of all APIs except Produce."""
    yield from _init(messages)
    for api_key, step in _ONE_ROW.items():
        yield from _one_row(messages, api_key, step)
    yield from _add_partitions(messages)
    yield from _markers(messages)


def produce_events(messages: Messages, batches: ProducedBatches) -> pa.Table:
    """PRODUCER_STEPS of produced batches."""
    rows = batches.row
    requests = messages.rows(ApiKey.PRODUCE)
    body = messages.body(ApiKey.PRODUCE, REQUEST, requests)
    assert body is not None  # each batch comes from such a request
    via = pa.array(np.searchsorted(requests, rows))
    count = np.clip(batches.last_delta + 1, 1, 2**31 - 1)
    return story(
        "producers",
        **messages.place(rows, batches.batch_index),
        producer_id=pa.array(batches.producer_id),
        producer_epoch=pa.array(batches.producer_epoch.astype(np.int16)),
        step=_constant(ProducerStep.PRODUCE, len(rows)),
        transactional_id=body.field("transactional_id").take(via),
        topic=batches.topic,
        partition=pa.array(batches.partition.astype(np.int32)),
        error_code=pa.array(batches.error_code.astype(np.int16), mask=~batches.answered),
        flag=pa.array(batches.is_transactional),
        base_sequence=pa.array(batches.base_sequence.astype(np.int32)),
        sequence_count=pa.array(count),
        record_count=pa.array(batches.record_count),
        capture_id=pa.array(messages.capture_id[rows]),
        packet=pa.array(np.ascontiguousarray(messages.exchanges["request"]["packet"][rows])),
        batch_pos=pa.array(batches.batch_pos),
        size=pa.array(batches.size),
    )


def _constant(step: ProducerStep, count: int) -> pa.Array:
    return pa.array(np.full(count, int(step), np.int8))


def _init(messages: Messages) -> Iterator[pa.Table]:
    """InitProducerId requests that returned an id; a refused one says nothing about a producer."""
    rows = messages.rows(ApiKey.INIT_PRODUCER_ID)
    if not len(rows):
        return
    rows = rows[messages.answered(ApiKey.INIT_PRODUCER_ID, rows) & (messages.error_code[rows] == 0)]
    request = messages.body(ApiKey.INIT_PRODUCER_ID, REQUEST, rows)
    response = messages.body(ApiKey.INIT_PRODUCER_ID, RESPONSE, rows)
    if request is None or response is None or not len(rows):
        return
    own = pc.fill_null(pc.equal(request.field("producer_id"), response.field("producer_id")), False)
    yield story(
        "producers",
        **messages.place(rows),
        producer_id=response.field("producer_id"),
        producer_epoch=response.field("producer_epoch"),
        step=_constant(ProducerStep.INIT, len(rows)),
        transactional_id=request.field("transactional_id"),
        error_code=messages.errors(ApiKey.INIT_PRODUCER_ID, rows),
        flag=own,
    )


def _one_row(messages: Messages, api_key: int, step: ProducerStep) -> Iterator[pa.Table]:
    rows = messages.rows(api_key)
    body = messages.body(api_key, REQUEST, rows)
    if body is None or not len(rows):
        return
    flag = body.field("committed") if step is ProducerStep.END else pa.nulls(len(rows), pa.bool_())
    data = pa.nulls(len(rows), pa.string())
    if step is ProducerStep.OFFSETS:
        data = _offsets(body, messages.body(api_key, RESPONSE, rows))
    yield story(
        "producers",
        **messages.place(rows),
        producer_id=body.field("producer_id"),
        producer_epoch=body.field("producer_epoch"),
        step=_constant(step, len(rows)),
        transactional_id=body.field("transactional_id"),
        error_code=messages.errors(api_key, rows),
        flag=flag,
        data=data,
    )


def _offsets(requests: pa.StructArray, responses: pa.StructArray | None) -> pa.Array:
    """Return JSON of the offsets that the responses of TxnOffsetCommit accepted."""
    answers = responses.to_pylist() if responses is not None else [None] * len(requests)
    offset_texts = []
    for request, response in zip(requests.to_pylist(), answers, strict=True):
        refused = {
            (topic["name"], partition["partition_index"])
            for topic in (response and response["topics"]) or ()
            for partition in topic["partitions"] or ()
            if partition["error_code"]
        }
        offsets: list[list[Any]] = [
            [request["group_id"], topic["name"], partition["partition_index"], offset]
            for topic in request["topics"] or ()
            for partition in topic["partitions"] or ()
            if (topic["name"], partition["partition_index"]) not in refused
            and (offset := partition["committed_offset"]) is not None
        ]
        offset_texts.append(json.dumps(offsets))
    return pa.array(offset_texts, pa.string())


def _add_partitions(messages: Messages) -> Iterator[pa.Table]:
    """One event per requested partition, with the result for that partition."""
    rows = messages.rows(ApiKey.ADD_PARTITIONS_TO_TXN)
    body = messages.body(ApiKey.ADD_PARTITIONS_TO_TXN, REQUEST, rows)
    if body is None or not len(rows):
        return
    old = pa.StructArray.from_arrays(
        [
            body.field(f"v3_and_below_{name}")
            for name in ("transactional_id", "producer_id", "producer_epoch", "topics")
        ],
        ["transactional_id", "producer_id", "producer_epoch", "topics"],
    )
    new, new_row = flattened(body.field("transactions"))
    answers = _partition_answers(messages, rows)
    for transactions, owner, is_new in ((old, np.arange(len(rows)), False), (new, new_row, True)):
        topics, in_transaction = flattened(transactions.field("topics"))
        partitions, in_topic = flattened(topics.field("partitions"))
        if not len(partitions):
            continue
        transaction = in_transaction[in_topic]
        row = owner[transaction]
        via = pa.array(transaction)
        ids = transactions.field("transactional_id").take(via)
        requested = pa.table(
            {
                "number": np.arange(len(partitions)),
                "row": row,
                "id": ids if is_new else pa.array([""] * len(partitions), pa.string()),
                "topic": topics.field("name").take(pa.array(in_topic)),
                "partition": partitions,
            }
        )
        keys = ["row", "id", "topic", "partition"]
        joined = requested.join(answers, keys, join_type="left outer", use_threads=False)
        joined = joined.sort_by("number")
        step = _constant(ProducerStep.ADD, len(partitions))
        if is_new:
            verified = transactions.field("verify_only").take(via)
            step = pc.if_else(verified, _constant(ProducerStep.VERIFY, len(partitions)), step)
        yield story(
            "producers",
            **messages.place(rows[row], np.arange(len(partitions))),
            producer_id=transactions.field("producer_id").take(via),
            producer_epoch=transactions.field("producer_epoch").take(via),
            step=step,
            transactional_id=ids,
            topic=requested["topic"].combine_chunks(),
            partition=partitions,
            # version 4 and later can refuse the request as a whole
            error_code=pc.coalesce(
                joined["error"].combine_chunks(),
                messages.errors(ApiKey.ADD_PARTITIONS_TO_TXN, rows[row]),
            ),
        )


def _partition_answers(messages: Messages, rows: Rows) -> pa.Table:
    """(row, id, topic, partition) -> error, each key once; id is "" before version 4."""
    empty = pa.schema(
        [
            ("row", pa.int64()),
            ("id", pa.string()),
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("error", pa.int16()),
        ]
    ).empty_table()
    body = messages.body(ApiKey.ADD_PARTITIONS_TO_TXN, RESPONSE, rows)
    if body is None:
        return empty
    results, result_row = flattened(body.field("results_by_transaction"))
    topics, in_result = flattened(results.field("topic_results"))
    parts = [empty]
    ids = results.field("transactional_id").take(pa.array(in_result))
    parts.append(_answers(topics, result_row[in_result], ids))
    topics, row = flattened(body.field("results_by_topic_v3_and_below"))
    parts.append(_answers(topics, row, pa.array([""] * len(row), pa.string())))
    results_of_all = pa.concat_tables(parts)
    keys = ["row", "id", "topic", "partition"]
    grouped = results_of_all.group_by(keys, use_threads=False).aggregate([("error", "max")])
    return grouped.rename_columns(
        ["error" if name == "error_max" else name for name in grouped.column_names]
    ).select(empty.column_names)


def _answers(topics: pa.StructArray, row: Rows, ids: pa.Array) -> pa.Table:
    partitions, in_topic = flattened(topics.field("results_by_partition"))
    via = pa.array(in_topic)
    return pa.table(
        {
            "row": pa.array(row[in_topic], pa.int64()),
            "id": ids.take(via),
            "topic": topics.field("name").take(via),
            "partition": partitions.field("partition_index"),
            "error": partitions.field("partition_error_code"),
        }
    )


def _markers(messages: Messages) -> Iterator[pa.Table]:
    """One event per partition on which a coordinator ends a transaction."""
    rows = messages.rows(ApiKey.WRITE_TXN_MARKERS)
    body = messages.body(ApiKey.WRITE_TXN_MARKERS, REQUEST, rows)
    if body is None or not len(rows):
        return
    markers, row = flattened(body.field("markers"))
    topics, in_marker = flattened(markers.field("topics"))
    partitions, in_topic = flattened(topics.field("partition_indexes"))
    if not len(partitions):
        return
    via = pa.array(in_marker[in_topic])
    yield story(
        "producers",
        **messages.place(rows[row[in_marker[in_topic]]], np.arange(len(partitions))),
        producer_id=markers.field("producer_id").take(via),
        producer_epoch=markers.field("producer_epoch").take(via),
        step=_constant(ProducerStep.MARKER, len(partitions)),
        topic=topics.field("name").take(pa.array(in_topic)),
        partition=partitions,
        error_code=messages.errors(ApiKey.WRITE_TXN_MARKERS, rows[row[in_marker[in_topic]]]),
        flag=markers.field("transaction_result").take(via),
    )
