"""Metadata responses that name the leader of a partition, as the table `apis/Metadata` has them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pyarrow as pa

from tests.builders.tables import SECOND_US, Row, at, exchange

_PARTITION = pa.struct(
    [("partition_index", pa.int32()), ("leader_id", pa.int32()), ("leader_epoch", pa.int32())]
)
_TOPIC = pa.struct([("name", pa.string()), ("partitions", pa.list_(_PARTITION))])
_RESPONSE = pa.struct([("topics", pa.list_(_TOPIC))])
Leader = tuple[float, int, int]  # second of the response, node id, epoch


def leaders_named(leaders: Sequence[Leader]) -> tuple[list[Row], pa.Table]:
    """The exchanges, numbered from 0, and the table of Metadata of the partition orders-0."""
    exchanges = [exchange(n, at_us=round(s * SECOND_US)) for n, (s, _, _) in enumerate(leaders)]
    partitions = [
        {"partition_index": 0, "leader_id": leader, "leader_epoch": epoch}
        for _, leader, epoch in leaders
    ]
    responses = [{"topics": [{"name": "orders", "partitions": [one]}]} for one in partitions]
    times = [datetime.fromtimestamp(at(s) / SECOND_US, UTC) for s, _, _ in leaders]
    table = {
        "exchange_id": pa.array(range(len(leaders)), pa.int64()),
        "connection_id": pa.array([1] * len(leaders), pa.int64()),
        "response_time": pa.array(times, pa.timestamp("us", "UTC")),
        "response": pa.array(responses, _RESPONSE),
    }
    return exchanges, pa.table(table)
