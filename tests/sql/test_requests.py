"""The base tables: who is a broker."""

from kdissect.protocol.api_keys import ApiKey
from kdissect.sql.requests import make_requests
from tests.builders.tables import Row, exchange, tables


def _fetch(number: int, replica_id: int = -1, connection_id: int = 1) -> Row:
    asked = {"replica_id": replica_id}
    return {"exchange_id": number, "connection_id": connection_id, "request": asked}


def test_brokers_are_known_by_requests_that_only_they_send() -> None:
    """A Fetch with a replica ID, or an API of brokers only, marks its connection."""
    made = tables(
        exchanges=[
            exchange(1, api_name="Fetch"),
            exchange(2, connection_id=2, api_name="Fetch"),
            exchange(3, connection_id=3, api_key=ApiKey.BROKER_HEARTBEAT),
            exchange(4, connection_id=3, api_name="ApiVersions"),
        ],
        apis__Fetch=[_fetch(1), _fetch(2, replica_id=4, connection_id=2)],
        connections=[{"connection_id": number} for number in (1, 2, 3)],
    )
    with made.database() as database:
        make_requests(database)
        rows = database.rows(
            "SELECT exchange_id FROM requests WHERE is_broker ORDER BY exchange_id"
        )
    assert [row["exchange_id"] for row in rows] == [2, 3, 4]
