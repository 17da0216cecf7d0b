"""What changed: captures with themselves, with others, and with changes made by hand."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import kdissect
from kdissect.api import Tables
from kdissect.diff.compare import (
    _LATENCY,
    KINDS,
    UnknownKind,
    _judge,
    compare,
    failing,
    parse_kinds,
)
from kdissect.diff.sample_tests import SampleTest
from tests.builders.captures import lose_packets
from tests.builders.halves import halves
from tests.builders.tables import changed, connection, exchange, with_column
from tests.builders.tables import tables as table_set
from tests.cases import cases


@pytest.fixture(scope="module")
def sarama(captures: Path) -> Tables:
    return kdissect.read(captures / "sarama.pcap.gz")


@pytest.fixture(scope="module")
def java(captures: Path) -> Tables:
    return kdissect.read(captures / "java_2_0_1.pcap")


@cases("capture", ["java_2_0_1.pcap"], heavy=["sarama.pcap.gz"])
def test_a_capture_does_not_differ_from_itself(capture: str, captures: Path) -> None:
    """A capture compared with itself."""
    tables = kdissect.read(captures / capture)
    document = compare(tables, tables)
    assert document["changes"] == {kind: [] for kind in KINDS}
    assert document["a"] == document["b"]
    assert document["a"]["exchange_count"] == tables.exchanges.num_rows
    assert failing(document, KINDS) == []


def test_apis_versions_and_clients_of_two_captures_differ(sarama: Tables, java: Tables) -> None:
    """APIs, versions and clients are those that one lists and the other does not."""
    document = compare(java, sarama)
    seen = {
        side: set(tables.exchanges.to_pandas(["api_name"]).api_name)
        for side, tables in (("a", java), ("b", sarama))
    }
    apis = {(row["api_name"], row["change"]) for row in document["changes"]["apis"]}
    assert apis == {(name, "removed") for name in seen["a"] - seen["b"]} | {
        (name, "added") for name in seen["b"] - seen["a"]
    }
    versions = document["changes"]["versions"]
    fetch = {(row["api_version"], row["change"]) for row in versions if row["api_name"] == "Fetch"}
    assert fetch == {(8, "removed"), (10, "added"), (12, "added")}
    clients = {row["client_id"]: row["change"] for row in document["changes"]["clients"]}
    assert clients["java-2.0.1-gzip"] == "removed"
    assert "1" not in clients or clients["1"] == "changed"
    assert set(failing(document, KINDS)) >= {"apis", "versions", "clients"}


def repeated(tables: Tables) -> Tables:
    """The same exchanges four times in a row, each time on connections of their own."""

    def again(table: pa.Table, number: int) -> pa.Table:
        for name in ("connection_id", "exchange_id"):
            table = with_column(table, name, pc.bit_wise_xor(table[name], number))
        later = pa.scalar(number * 10_000_000, pa.duration("us"))
        return with_column(table, "request_time", pc.add(table["request_time"], later))

    def four(table: pa.Table) -> pa.Table:
        return pa.concat_tables(again(table, number) for number in range(4))

    return changed(tables, "exchanges", four)


@pytest.fixture(scope="module")
def many(sarama: Tables) -> Tables:
    return repeated(sarama)


def slowed(tables: Tables, api: str, delay_ms: float, share: float = 1.0) -> Tables:
    """Answers of an API that come later, all of them or a share."""

    def delayed(table: pa.Table) -> pa.Table:
        rows = pa.array(range(table.num_rows))
        chosen = pc.and_(
            pc.equal(table["api_name"], api), pc.less(pc.bit_wise_and(rows, 15), int(16 * share))
        )
        later = pc.add(table["service_ms"], delay_ms)
        return with_column(table, "service_ms", pc.if_else(chosen, later, table["service_ms"]))

    return changed(tables, "exchanges", delayed)


def test_slower_answers_are_worse_one_way_only(many: Tables) -> None:
    """Ten milliseconds more in one API are found, in that alone, and are worse one way only."""
    slow = slowed(many, "Produce", 10)
    document, back = compare(many, slow), compare(slow, many)
    (row,) = document["changes"]["latency"]
    assert (row["api"], row["change"], row["is_worse"]) == ("Produce", "slower", True)
    assert row["p50_b"] == pytest.approx(row["p50_a"] + 10, abs=0.01)
    assert row["delta"] > 0.5
    assert failing(document, ["latency"]) == ["latency"]
    (row,) = back["changes"]["latency"]
    assert (row["change"], row["is_worse"]) == ("faster", False)
    assert failing(back, ["latency"]) == []


def test_a_little_slower(many: Tables) -> None:
    """A certain slowdown below the threshold is no change."""
    slow = slowed(many, "Produce", 2)
    assert compare(many, slow)["changes"]["latency"] == []


def renamed(tables: Tables) -> Tables:
    """The tables with other client IDs."""

    def rename(table: pa.Table) -> pa.Table:
        names = pc.binary_join_element_wise("new", table["client_id"], "-")
        return with_column(table, "client_id", names)

    return changed(tables, "exchanges", rename)


def test_too_few_connections(sarama: Tables) -> None:
    """Heartbeats of four connections of other clients: nothing is certain, and it says so."""
    slow = renamed(slowed(sarama, "Heartbeat", 1000))
    document = compare(sarama, slow)
    (row,) = document["changes"]["latency"]
    assert (row["api"], row["change"], row["is_decided"]) == ("Heartbeat", "not compared", False)
    assert (row["connections_a"], row["connections_b"]) == (4, 4)
    assert row["too_few"] == "connections"
    assert failing(document, ["latency"]) == []


@pytest.mark.parametrize(("p_value", "word"), [(0.005, "slower"), (0.05, "undecided"), (0.5, None)])
def test_a_large_difference_that_may_be_chance_is_undecided(
    p_value: float, word: str | None
) -> None:
    """Evidence between the two rates is named, and no failure."""
    row: dict[str, Any] = {"midrank": SampleTest(p_value), "delta": 0.5, "n_a": 50, "n_b": 50}
    row |= {f"{name}_{side}": ms for name in ("p50", "p90") for side, ms in (("a", 5), ("b", 50))}
    judged = _judge(row, _LATENCY)
    assert (judged["change"], judged["is_decided"]) == (word, word != "undecided")


def test_the_same_few_clients(sarama: Tables) -> None:
    """Heartbeats of four clients, each compared with itself: a difference of all is certain."""
    document = compare(sarama, slowed(sarama, "Heartbeat", 1000))
    (row,) = document["changes"]["latency"]
    assert (row["api"], row["change"], row["is_decided"]) == ("Heartbeat", "slower", True)
    assert failing(document, KINDS) == ["latency"]


def test_exchanges_of_one_moment_are_one_event(many: Tables) -> None:
    """All exchanges of an API in one moment are one event, however many connections they have."""

    def at_once(table: pa.Table) -> pa.Table:
        times, is_produce = table["request_time"], pc.equal(table["api_name"], "Produce")
        return with_column(table, "request_time", pc.if_else(is_produce, pc.min(times), times))

    both = [changed(each, "exchanges", at_once) for each in (many, slowed(many, "Produce", 1000))]
    (row,) = compare(*both)["changes"]["latency"]
    assert (row["change"], row["too_few"]) == ("not compared", "moments")
    assert (row["moments_a"], row["moments_b"]) == (1, 1)


@cases("seed", [0], heavy=[1, 2])
def test_random_halves_are_alike(seed: int, sarama: Tables, java: Tables) -> None:
    """Connections dealt out at random: no false alarm of any kind."""
    for tables in (sarama, java):
        document = compare(*halves(tables, seed))
        assert failing(document, ["errors", "latency", "sizes"]) == []


def test_a_heavier_tail(many: Tables) -> None:
    """One in eight answers much slower: the middle stays where it was."""
    slow = slowed(many, "Produce", 100, share=1 / 8)
    found = {row["api"]: row for row in compare(many, slow)["changes"]["latency"]}
    assert found["Produce"]["change"] == "heavier tail"
    assert found["Produce"]["is_worse"]


def test_long_polls_apart(sarama: Tables, many: Tables) -> None:
    """A Fetch that waits for data is no slow broker."""
    rows = compare(sarama, sarama)["compared"]["latency"]
    fetches = {row["wait"]: row for row in rows if row["api"] == "Fetch"}
    assert fetches["long_poll"]["p50_a"] > 50
    document = compare(many, slowed(many, "Fetch", 1000))
    assert {row["wait"] for row in document["changes"]["latency"]} == {"long_poll"}
    assert failing(document, ["latency"]) == []


def failed(tables: Tables, api: str, code: int, every: int) -> Tables:
    """One of so many answers of an API has an error."""

    def change(table: pa.Table) -> pa.Table:
        codes = table["error_codes"].to_pylist()
        rows = [row for row, name in enumerate(table["api_name"].to_pylist()) if name == api]
        for row in rows[::every]:
            codes[row] = [code]
        return with_column(table, "error_codes", pa.array(codes, table["error_codes"].type))

    return changed(tables, "exchanges", change)


def test_a_new_error_appears_and_is_a_failure(many: Tables) -> None:
    """One that was not there before appears; the other way round it is gone, and no failure."""
    worse = failed(many, "Produce", 29, 3)
    document = compare(many, worse)
    (row,) = document["changes"]["errors"]
    assert (row["api_name"], row["error_name"]) == ("Produce", "TOPIC_AUTHORIZATION_FAILED")
    assert (row["change"], row["count_a"]) == ("appeared", 0)
    assert failing(document, ["errors"]) == ["errors"]
    back = compare(worse, many)
    assert back["changes"]["errors"][0]["change"] == "gone"
    assert failing(back, ["errors"]) == []


def test_an_error_that_appeared_by_chance(many: Tables) -> None:
    """One error among many responses is listed, and is not worse: its p-value is 1."""
    document = compare(many, failed(many, "Produce", 29, 10_000))
    (row,) = document["changes"]["errors"]
    assert (row["change"], row["count_b"], row["p_value"]) == ("appeared", 1, 1.0)
    assert failing(document, ["errors"]) == []


def test_more_errors_than_chance_allows_are_worse(many: Tables) -> None:
    """More errors than chance allows are worse; a few more are not listed."""
    some = failed(many, "Produce", 29, 20)
    (row,) = compare(some, failed(many, "Produce", 29, 2))["changes"]["errors"]
    assert row["change"] == "more"
    assert compare(some, failed(many, "Produce", 29, 16))["changes"]["errors"] == []


def test_steps_of_the_protocol_are_no_failure(many: Tables) -> None:
    """One rebalance more is listed, and is not worse."""
    document = compare(many, failed(many, "Produce", 27, 2))
    (row,) = document["changes"]["errors"]
    assert (row["error_name"], row["change"]) == ("REBALANCE_IN_PROGRESS", "appeared")
    assert row["p_value"] < 0.01
    assert failing(document, ["errors"]) == []


def test_larger_requests_and_batches_are_found(sarama: Tables, many: Tables) -> None:
    """Larger requests, and larger batches of a topic."""

    def grown(tables: Tables, name: str, column: str, factor: int) -> Tables:
        def grow(table: pa.Table) -> pa.Table:
            return with_column(table, column, pc.multiply(table[column], factor))

        return changed(tables, name, grow)

    large = grown(many, "exchanges", "request_size", 10)
    found = {(row["part"], row["api"]) for row in compare(many, large)["changes"]["sizes"]}
    assert ("request", "Produce") in found
    assert all(part == "request" for part, _ in found)
    large = grown(sarama, "record_batches", "size", 20)
    assert {row["part"] for row in compare(sarama, large)["changes"]["sizes"]} == {"batch"}


def test_another_release_of_a_client_is_found(sarama: Tables) -> None:
    """Another release of the software, another principal, another address."""

    def upgraded(table: pa.Table) -> pa.Table:
        name = "client_software_version"
        return with_column(table, name, pc.replace_substring_regex(table[name], "^", "9."))

    document = compare(sarama, changed(sarama, "connections", upgraded))
    assert document["changes"]["clients"]
    assert all(row["fields"] == ["software"] for row in document["changes"]["clients"])


def test_a_topic_created_with_another_setting_is_found(java: Tables) -> None:
    """A setting that was created otherwise."""

    def otherwise(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        for row in rows:
            for topic in row["request"]["topics"]:
                topic["num_partitions"] += 1
        return pa.Table.from_pylist(rows, schema=table.schema)

    document = compare(java, changed(java, "apis/CreateTopics", otherwise))
    rows = document["changes"]["configs"]
    assert rows
    assert {row["config"] for row in rows} == {"(partitions)"}
    assert all(int(row["value_b"]) == int(row["value_a"]) + 1 for row in rows)


@pytest.mark.parametrize(
    ("operation", "error", "values"), [(0, 0, ["1"]), (1, 0, [None]), (3, 0, []), (0, 29, [])]
)
def test_only_settings_that_the_broker_took_differ(
    operation: int, error: int, values: list[str | None]
) -> None:
    """A changed or deleted value counts, an item taken from a list and a refused change do not."""

    def side(api: str, resource: Any, request: Any = None) -> Tables:
        row = {"exchange_id": 1, "request": request, "request_time": 0, "response_time": 0}
        answers = {"results": [resource], "responses": [resource]}
        return table_set(**{f"apis__{api}": [row | {"response": answers}]})

    topic = {"resource_type": 2, "resource_name": "orders"}
    read = topic | {"error_code": 0, "configs": [{"name": "retention.ms", "value": "2"}]}
    item = {"name": "retention.ms", "config_operation": operation, "value": "1"}
    asked = {"validate_only": False, "resources": [topic | {"configs": [item]}]}
    altered = side("IncrementalAlterConfigs", topic | {"error_code": error}, asked)
    rows = compare(side("DescribeConfigs", read), altered)["changes"]["configs"]
    assert [row["value_b"] for row in rows] == values


def test_an_empty_side(sarama: Tables) -> None:
    """Nothing on one side: everything is gone, nothing is compared."""
    empty = table_set(**{name: sarama[name].schema.empty_table() for name in sarama.names})
    document = compare(sarama, empty)
    assert document["b"]["exchange_count"] == 0
    kinds = ("errors", "latency", "transfers", "round_trips", "sizes")
    assert document["compared"] == {kind: [] for kind in kinds}
    assert document["changes"]["errors"] == []
    assert {row["change"] for row in document["changes"]["apis"]} == {"removed"}


def test_lost_answers_are_not_missing(sarama: Tables, captures: Path, tmp_path: Path) -> None:
    """Two percent of the packets are gone: their answers are no errors, and are counted."""
    path = lose_packets(captures / "sarama.pcap.gz", tmp_path / "lost.pcap", 0.02)
    document = compare(sarama, kdissect.read(path))
    assert document["a"]["unjudged_count"] == 0
    assert document["b"]["unjudged_count"] > 5
    assert [row for row in document["compared"]["errors"] if row["error_code"] is None] == []
    assert failing(document, ["errors"]) == []


def test_a_guessed_version_is_no_change(many: Tables) -> None:
    """A response without its request has a version that only its bytes suggest."""

    def guess(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        row = next(row for row in rows if row["api_name"] == "SyncGroup")
        row |= {"status": "request_missing", "api_version": 99, "client_id": None}
        return pa.Table.from_pylist(rows, table.schema)

    document = compare(many, changed(many, "exchanges", guess))
    assert document["changes"]["versions"] == []
    assert document["a"]["client_count"] == document["b"]["client_count"]


def test_an_unknown_kind_is_refused() -> None:
    """Kinds are a comma list; an unknown one gets an error that names the known ones."""
    assert parse_kinds(None) == []
    assert parse_kinds(" errors, latency ") == ["errors", "latency"]
    with pytest.raises(UnknownKind, match=r"speed.*apis, versions, clients, errors"):
        parse_kinds("errors,speed")


def _connections(rtt_ms: float) -> Tables:
    """Forty connections of one client, one after the other, with round trips of about rtt_ms."""
    numbers = range(40)
    return table_set(
        exchanges=[exchange(n, at_us=n * 1_000_000, connection_id=n) for n in numbers],
        connections=[
            connection(n, request_rtt_ms_p50=rtt_ms + n / 100, response_rtt_ms_p50=0.1)
            for n in numbers
        ],
    )


def test_round_trips_of_a_client() -> None:
    """A network that became slower is a change of its client's round trips, on one side."""
    document = compare(_connections(2.0), _connections(9.0))
    (change,) = document["changes"]["round_trips"]
    expected = ("app", "client", "p50")
    assert (change["client_id"], change["end_point"], change["percentile"]) == expected
    assert (change["change"], change["p50_a"], change["p50_b"]) == ("longer", 2.19, 9.19)
    assert change["p_value"] < 0.01
    assert failing(document, KINDS) == ["round_trips"]
    assert compare(_connections(2.0), _connections(2.5))["changes"]["round_trips"] == []


def _transfers(name: str, milliseconds: float) -> Tables:
    """Forty connections with ten answers each, whose upload or download takes so long."""
    numbers = range(400)
    return table_set(
        exchanges=[
            exchange(n, at_us=n * 100_000, connection_id=n % 40)
            | {name: milliseconds + n % 7 / 10, "service_ms": 1.0}
            for n in numbers
        ],
        connections=[connection(n) for n in range(40)],
    )


@pytest.mark.parametrize("part", ["upload", "download"])
def test_slower_transfers_leave_the_latency(part: str) -> None:
    """Requests or responses that take longer on the wire are worse; the latency is the same."""
    fast, slow = _transfers(f"{part}_ms", 1), _transfers(f"{part}_ms", 9)
    document = compare(fast, slow)
    (change,) = document["changes"]["transfers"]
    assert (change["part"], change["api"], change["change"]) == (part, "Metadata", "slower")
    assert (change["p50_a"], change["p50_b"]) == (1.3, 9.3)
    assert failing(document, KINDS) == ["transfers"]
    assert failing(compare(slow, fast), KINDS) == []
