"""Metadata responses that name the leader of a partition, as the table `apis/Metadata` has them."""

from collections.abc import Sequence

from tests.builders.tables import Row, at, exchange

Leader = tuple[float, int, int]  # second of the response, node id, epoch


def leaders_named(leaders: Sequence[Leader]) -> tuple[list[Row], list[Row]]:
    """The exchanges, numbered from 0, and the rows of Metadata of the partition orders-0."""
    exchanges = [exchange(n, second=s) for n, (s, _, _) in enumerate(leaders)]
    rows: list[Row] = [
        {
            "exchange_id": n,
            "connection_id": 1,
            "response_time": at(second),
            "response": {
                "topics": [
                    {
                        "name": "orders",
                        "partitions": [
                            {"partition_index": 0, "leader_id": leader, "leader_epoch": epoch}
                        ],
                    }
                ]
            },
        }
        for n, (second, leader, epoch) in enumerate(leaders)
    ]
    return exchanges, rows
