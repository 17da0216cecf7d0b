"""Events of fetch sessions (KIP-227) from decoded Fetch messages, with array operations only."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Bools, Ints
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import RESPONSE
from kdissect.stories.events import begins, event_table, flattened, place
from kdissect.stories.sequences import codes
from kdissect.tables.message_chunk import MessageChunk

_FULL, _FINAL = 0, -1  # KIP-227: session epochs 0 and -1 start and end a session


class Ask(IntEnum):
    """The changes that a Fetch makes to a session, in the order in which a broker applies them."""

    START = 0
    FORGET = 1
    ADD = 2  # requests a partition, which stays in the session
    CLOSE = 3
    SEEN = 4  # the highest epoch in a chunk


def fetch_events(messages: MessageChunk) -> Iterator[pa.Table]:
    """FETCH_EVENT of a chunk; repeated requests for a partition make one event."""
    rows, request = messages.requests(ApiKey.FETCH)
    if request is None:
        return
    response = messages.body(ApiKey.FETCH, RESPONSE, rows)
    epoch = pc.fill_null(request.field("session_epoch"), _FINAL).to_numpy(zero_copy_only=False)
    old = pc.fill_null(request.field("session_id"), 0).to_numpy(zero_copy_only=False)
    new = pc.fill_null(response.field("session_id"), 0).to_numpy(zero_copy_only=False)
    error = pc.fill_null(response.field("error_code"), 0).to_numpy(zero_copy_only=False)
    session = np.where(epoch == _FULL, new, old)
    kept = np.flatnonzero((session != 0) & (error == 0))
    closed = np.flatnonzero((old != 0) & (epoch <= _FULL) & ((epoch != _FULL) | (old != new)))
    if len(closed):
        yield _events(messages, rows[closed], Ask.CLOSE, old[closed], epoch[closed])
    starts = kept[epoch[kept] == _FULL]
    if len(starts):
        yield _events(messages, rows[starts], Ask.START, session[starts], epoch[starts])
    kept = kept[epoch[kept] >= _FULL]
    if not len(kept):
        return
    requests = request.take(pa.array(kept))
    broker = codes(messages.broker.take(pa.array(rows[kept])), pa.array(session[kept]))
    yield _seen(messages, rows[kept], broker, session[kept], epoch[kept])
    for ask, name in ((Ask.FORGET, "forgotten_topics_data"), (Ask.ADD, "topics")):
        topics, row = flattened(requests.field(name))
        partitions, in_topic = flattened(topics.field("partitions"))
        if not len(partitions):
            continue
        if ask is Ask.ADD:
            partitions = partitions.field("partition")
        known = messages.topic_names.names(topics.field("topic_id"))
        names = pc.coalesce(topics.field("topic"), known).take(pa.array(in_topic))
        row = row[in_topic]
        if ask is Ask.ADD:
            again = _again(broker, row, names, partitions, _changing(requests, broker, epoch[kept]))
            chosen = np.flatnonzero(~again)
            row, via = row[chosen], pa.array(chosen)
            names, partitions = names.take(via), partitions.take(via)
        yield _events(
            messages,
            rows[kept[row]],
            ask,
            session[kept[row]],
            epoch[kept[row]],
            topic=names,
            partition=partitions,
        )


def _events(
    messages: MessageChunk, rows: Ints, ask: Ask, session: Ints, epoch: Ints, **more: pa.Array
) -> pa.Table:
    return event_table(
        "fetches",
        **place(messages, rows, np.full(len(rows), int(ask), np.int64)),
        broker=messages.broker.take(pa.array(rows)),
        client_id=messages.client_ids.take(pa.array(rows)).cast(pa.string()),
        session_id=pa.array(session.astype(np.int32)),
        epoch=pa.array(epoch.astype(np.int32)),
        **more,
    )


def _seen(messages: MessageChunk, rows: Ints, broker: Ints, session: Ints, epoch: Ints) -> pa.Table:
    """One event per session, with its highest epoch here."""
    order = np.lexsort((np.arange(len(rows)), epoch, broker))
    last = order[begins(broker[order][::-1])[::-1]]
    return _events(messages, rows[last], Ask.SEEN, session[last], epoch[last])


def _changing(some: pa.StructArray, broker: Ints, epoch: Ints) -> Bools:
    """bool per Fetch: its session forgets a partition in this chunk, or starts again."""
    forgets = pc.list_value_length(some.field("forgotten_topics_data"))
    moves = pc.fill_null(pc.greater(forgets, 0), False).to_numpy(zero_copy_only=False)
    moves = moves | (epoch == _FULL)
    result: Bools = np.isin(broker, broker[moves])
    return result


def _again(
    broker: Ints, row: Ints, names: pa.Array, partitions: pa.Array, changing: Bools
) -> Bools:
    """bool per requested partition: the same session requested it earlier in this chunk."""
    key = codes(pa.array(broker[row]), names, partitions)
    _, first = np.unique(key, return_index=True)
    again = np.ones(len(row), bool)
    again[first] = False
    return again & ~changing[row]
