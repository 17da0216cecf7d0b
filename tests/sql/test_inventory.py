"""The inventory of clients: its rows, their comparison in time, and several table sets."""

import csv
from pathlib import Path
from typing import Any

import kdissect
from kdissect.api import joined_sets
from kdissect.sql.formats import write_csv_file
from tests.builders.tables import START_US, Row, at, connection, exchange, tables

SECOND = 1_000_000


def _call(number: int, api: str, key: int, second: float, **values: Any) -> Row:
    """A request of an API, so many seconds after the start."""
    row = exchange(number, second=second, api_name=api, api_key=key)
    return row | {"version_source": "request_header"} | values


def _by_id(rows: list[Row]) -> dict[str, Row]:
    return {row["client_id"]: row for row in rows}


def _one(rows: list[Row], **more: Any) -> Row:
    """The only client of some exchanges."""
    more.setdefault("connections", [connection(1)])
    (client,) = tables(exchanges=rows, **more).inventory().to_pylist()
    return client


def test_topics_groups_and_versions_of_a_client() -> None:
    """Topics by direction; groups of members only, because monitors send OffsetFetch, too."""
    client = _one(
        [
            _call(1, "Produce", 0, 1, api_version=9, topics=["orders"]),
            _call(2, "Fetch", 1, 2, api_version=12, topics=["stock"]),
            _call(3, "Fetch", 1, 3, api_version=4, topics=["stock"]),
            _call(4, "OffsetFetch", 9, 4, api_version=8, group_id="watched"),
            _call(5, "OffsetCommit", 8, 5, api_version=8, group_id="billing"),
            _call(6, "Metadata", 3, 6, api_version=1, version_source="inferred"),
        ]
    )
    assert client["topics_written"] == ["orders"]
    assert client["topics_read"] == ["stock"]
    assert client["groups"] == ["billing"]
    assert client["api_versions"] == [
        *("Fetch v4", "Fetch v12", "OffsetCommit v8", "OffsetFetch v8", "Produce v9")
    ]
    assert (client["request_count"], client["connection_count"]) == (6, 1)


def test_a_fetch_session_from_before_the_capture() -> None:
    """Its requests name no topic, so the record batches of its responses do."""
    batch = {"exchange_id": 1, "source": "fetch", "topic": "stock", "batch_index": 0}
    client = _one([_call(1, "Fetch", 1, 1, topics=[])], record_batches=[batch])
    assert client["topics_read"] == ["stock"]


def test_observed_time_counts_each_moment_once() -> None:
    """Connections from 0 to 10 s, 5 to 20 s and 50 to 60 s are 30 s."""
    spans = {1: (0, 10), 2: (5, 20), 3: (50, 60)}
    links = [
        connection(number, first_time=at(begin), last_time=at(end))
        for number, (begin, end) in spans.items()
    ]
    rows = [_call(number, "Metadata", 3, number, connection_id=number) for number in spans]
    assert _one(rows, connections=links)["observed_ms"] == 30_000


def test_a_lost_request_leaves_the_name_of_its_connection() -> None:
    """A response alone belongs to the only client of the connection."""
    lost = {"status": "request_missing", "client_id": None, "request_time": None}
    client = _one([_call(1, "Metadata", 3, 1), _call(2, "Metadata", 3, 2, **lost)])
    assert (client["client_id"], client["request_count"]) == ("app", 2)


def test_clients_before_and_after_a_time() -> None:
    """New, gone and changed ones; an API that is not used again is no change."""
    rows = [
        _call(1, "Fetch", 1, 1, client_id="reader", api_version=4, topics=["a"]),
        _call(2, "ListOffsets", 2, 1, client_id="reader"),
        _call(3, "Fetch", 1, 20, client_id="reader", api_version=12, topics=["a", "b"]),
        _call(4, "Produce", 0, 1, client_id="old", topics=["a"]),
        _call(5, "Produce", 0, 20, client_id="fresh", topics=["a"]),
        _call(6, "Produce", 0, 1, client_id="steady", topics=["a"]),
        _call(7, "Produce", 0, 20, client_id="steady", topics=["a"]),
    ]
    since = (START_US + 10 * SECOND) / SECOND
    made = tables(exchanges=rows, connections=[connection(1)])
    clients = _by_id(made.inventory(since).to_pylist())
    changes = {name: row["change"] for name, row in clients.items()}
    assert changes == {"reader": "changed", "old": "gone", "fresh": "new", "steady": "same"}
    assert clients["reader"]["changes"] == [
        *("api_versions +Fetch v12", "api_versions -Fetch v4", "topics_read +b")
    ]
    assert clients["old"]["changes"] is None
    assert clients["old"]["topics_written"] == ["a"]


def test_the_file_is_no_formula(tmp_path: Path) -> None:
    """A client id that a spreadsheet would run gets an apostrophe; times are RFC 3339."""
    made = tables(
        exchanges=[_call(1, "Produce", 0, 1, client_id="=cmd()", topics=["a", "b"])],
        connections=[connection(1)],
    )
    path = tmp_path / "clients.csv"
    write_csv_file(made.inventory().to_arrow(), str(path))
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["client_id"] == "'=cmd()"
    assert row["topics_written"] == "a b"
    assert row["first_time"].endswith("Z")


def _set(tmp_path: Path, name: str, capture: Path) -> Path:
    kdissect.read(capture).write(tmp_path / name)
    return tmp_path / name


def test_several_sets_are_one(tmp_path: Path, captures: Path) -> None:
    """Each table has the rows of both sets, and SQL sees them."""
    one, two = captures / "librdkafka.pcap", captures / "java_2_0_1.pcap"
    sets = [_set(tmp_path, "monday", one), _set(tmp_path, "tuesday", two)]
    both, each_alone = kdissect.open(sets), [kdissect.open(path) for path in sets]
    assert both.manifest["totals"]["packets"] == sum(
        each.manifest["totals"]["packets"] for each in each_alone
    )
    for name in both.names:
        alone = [each[name] for each in each_alone if name in each]
        assert both[name].num_rows == sum(table.num_rows for table in alone), name
    (row,) = (
        both.sql("select count(distinct path) n, any_value(role) from captures, inventory")
        .to_arrow()["n"]
        .to_pylist()
    )
    assert row == 2


def test_sets_of_rows_in_memory() -> None:
    """Sets that were read and sets on disk may be mixed."""
    first = tables(exchanges=[_call(1, "Produce", 0, 1, client_id="one")])
    second = tables(exchanges=[_call(2, "Produce", 0, 1, client_id="two")])
    assert joined_sets([first, second]).exchanges.num_rows == 2
