"""Metadata responses that name the leader of a partition, as the table `apis/Metadata` has them."""

from collections.abc import Sequence

from tests.builders.tables import Row, at, exchange

Leader = tuple[float, int, int]  # second of the response, node id, epoch


def leaders_named(leaders: Sequence[Leader]) -> tuple[list[Row], list[Row]]:
    """The exchanges, numbered from 0, and the rows of Metadata of the partition orders-0."""
    exchanges = [exchange(n, second=s) for n, (s, _, _) in enumerate(leaders)]
    rows: list[Row] = []
    for n, (second, leader, epoch) in enumerate(leaders):
        partition = {"partition_index": 0, "leader_id": leader, "leader_epoch": epoch}
        response = {"topics": [{"name": "orders", "partitions": [partition]}]}
        ids = {"exchange_id": n, "connection_id": 1}
        rows.append(ids | {"response_time": at(second), "response": response})
    return exchanges, rows
