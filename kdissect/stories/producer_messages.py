"""Events of producers from decoded messages, with array operations only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Ints, Rows
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.stories.events import ProducerStep, story
from kdissect.stories.messages import Messages, flattened
from kdissect.tables.message_marks import first_match
from kdissect.tables.records import FROM_PRODUCE

_ONE_ROW = {
    ApiKey.ADD_OFFSETS_TO_TXN: ProducerStep.ADD_OFFSETS,
    ApiKey.TXN_OFFSET_COMMIT: ProducerStep.OFFSETS,
    ApiKey.END_TXN: ProducerStep.END,
}


def producer_events(messages: Messages) -> Iterator[pa.Table]:
    """PRODUCER_STEPS of all APIs except Produce."""
    yield from _init(messages)
    for api_key, step in _ONE_ROW.items():
        yield from _one_row(messages, api_key, step)
    yield from _add_partitions(messages)
    yield from _markers(messages)


def produce_events(
    messages: Messages, sets: Rows, source: Ints, raw: pa.Table, shown: pa.Table
) -> Iterator[pa.Table]:
    """PRODUCER_STEPS of the produced batches with a producer id.

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
    requests = messages.rows(ApiKey.PRODUCE)
    body = messages.body(ApiKey.PRODUCE, REQUEST, requests)
    assert body is not None  # each batch comes from such a request
    errors = messages.marks.by_partition(Role.ERROR_CODE)
    error = np.append(errors["value"], 0)[first_match(sets[at], errors)]  # -1 is the last
    delta = pc.fill_null(pc.subtract(some["last_offset"], some["base_offset"]), 0).to_numpy()
    request = messages.exchanges["request"][rows]
    in_frame = raw["pos"].to_numpy()[chosen] - messages.request_start[rows]
    names = ("producer_id", "producer_epoch", "base_sequence", "record_count", "size")
    yield story(
        "producers",
        **messages.place(rows, some["batch_index"].to_numpy()),
        **{name: some[name].fill_null(-1) for name in names},
        step=_constant(ProducerStep.PRODUCE, len(rows)),
        transactional_id=body.field("transactional_id").take(
            pa.array(np.searchsorted(requests, rows))
        ),
        topic=pc.coalesce(*(some[name].cast(pa.string()) for name in ("topic", "topic_id"))),
        partition=some["partition"],
        error_code=pa.array(error.astype(np.int16), mask=~messages.answered(ApiKey.PRODUCE, rows)),
        flag=some["is_transactional"].fill_null(False),
        sequence_count=pa.array(np.clip(delta + 1, 1, 2**31 - 1)),
        capture_id=pa.array(messages.capture_id[rows]),
        packet=pa.array(np.ascontiguousarray(request["packet"])),
        batch_pos=pa.array(request["pos"] + 4 + in_frame),
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


def _partition_answers(messages: Messages, rows: Ints) -> pa.Table:
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


def _answers(topics: pa.StructArray, row: Ints, ids: pa.Array) -> pa.Table:
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
