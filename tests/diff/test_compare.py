"""What changed: captures with themselves, with others, and with changes made by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pytest

import kdissect
from kdissect.api import Table, Tables
from kdissect.diff import KINDS, UnknownKind, compare, failing, parse_kinds


@pytest.fixture(scope="module")
def sarama(captures: Path) -> Tables:
    return kdissect.read(captures / "sarama.pcap.gz")


@pytest.fixture(scope="module")
def java(captures: Path) -> Tables:
    return kdissect.read(captures / "java_2_0_1.pcap")


def changed(tables: Tables, name: str, change: Callable[[pa.Table], pa.Table]) -> Tables:
    """The tables with one of them made otherwise."""
    made = {each: tables[each] for each in tables.names}
    made[name] = Table(name, pads.dataset(change(tables[name].to_arrow())))
    return Tables(made, tables.manifest)


def column(table: pa.Table, name: str, values: Any) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(name), pc.cast(values, table[name].type))


@pytest.mark.parametrize("capture", ["sarama.pcap.gz", "java_2_0_1.pcap"])
def test_nothing_changed(capture: str, captures: Path) -> None:
    """A capture compared with itself."""
    tables = kdissect.read(captures / capture)
    document = compare(tables, tables)
    assert document["changes"] == {kind: [] for kind in KINDS}
    assert document["a"] == document["b"]
    assert document["a"]["exchange_count"] == tables.exchanges.num_rows
    assert failing(document, KINDS) == []


def test_two_captures(sarama: Tables, java: Tables) -> None:
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


def slowed(table: pa.Table, api: str, factor: float, share: float = 1.0) -> pa.Table:
    """Answers of an API that come later, all of them or a share."""
    rows = pa.array(range(table.num_rows))
    chosen = pc.and_(
        pc.equal(table["api_name"], api), pc.less(pc.bit_wise_and(rows, 15), int(16 * share))
    )
    latency = pc.if_else(chosen, pc.multiply(table["latency_ms"], factor), table["latency_ms"])
    return column(table, "latency_ms", latency)


def test_slower_answers(sarama: Tables) -> None:
    """Three times the latency of one API is found, in that one alone, and is worse one way only."""
    slow = changed(sarama, "exchanges", lambda table: slowed(table, "Produce", 3))
    document = compare(sarama, slow)
    (row,) = document["changes"]["latency"]
    assert (row["api"], row["change"], row["is_worse"]) == ("Produce", "slower", True)
    assert row["p50_b"] == pytest.approx(3 * row["p50_a"], abs=0.01)
    assert row["delta"] > 0.5
    assert failing(document, ["latency"]) == ["latency"]
    (back,) = compare(slow, sarama)["changes"]["latency"]
    assert (back["change"], back["is_worse"]) == ("faster", False)
    assert failing(compare(slow, sarama), ["latency"]) == []


def test_a_little_slower(sarama: Tables) -> None:
    """Five percent is not told of."""
    slow = changed(sarama, "exchanges", lambda table: slowed(table, "Produce", 1.05))
    assert compare(sarama, slow)["changes"]["latency"] == []


def repeated(table: pa.Table) -> pa.Table:
    """The same exchanges on four times as many connections."""
    copies = [
        column(table, "connection_id", pc.bit_wise_xor(table["connection_id"], number))
        for number in range(4)
    ]
    return pa.concat_tables(copies)


def test_a_heavier_tail(sarama: Tables) -> None:
    """One in eight answers fifty times slower: the middle stays where it was."""
    many = changed(sarama, "exchanges", repeated)
    slow = changed(many, "exchanges", lambda table: slowed(table, "Produce", 50, share=1 / 8))
    found = {row["api"]: row for row in compare(many, slow)["changes"]["latency"]}
    assert found["Produce"]["change"] == "heavier tail"
    assert found["Produce"]["is_worse"]


def test_long_polls_apart(sarama: Tables) -> None:
    """A Fetch that waits for data is no slow broker."""
    rows = compare(sarama, sarama)["compared"]["latency"]
    fetches = {row["wait"]: row for row in rows if row["api"] == "Fetch"}
    assert fetches["poll"]["p50_a"] > 50
    slow = changed(sarama, "exchanges", lambda table: slowed(table, "Fetch", 3))
    document = compare(sarama, slow)
    assert {row["wait"] for row in document["changes"]["latency"]} == {"poll"}
    assert failing(document, ["latency"]) == []


def failed(table: pa.Table, api: str, code: int, every: int) -> pa.Table:
    rows = table.to_pylist()
    for place, row in enumerate(row for row in rows if row["api_name"] == api):
        if place % every == 0:
            row["error_codes"] = [code]
    return pa.Table.from_pylist(rows, schema=table.schema)


def test_errors(sarama: Tables) -> None:
    """One that was not there before appears; the other way round it is gone, and no failure."""
    worse = changed(sarama, "exchanges", lambda table: failed(table, "Produce", 29, 10))
    document = compare(sarama, worse)
    (row,) = document["changes"]["errors"]
    assert (row["api_name"], row["error_name"]) == ("Produce", "TOPIC_AUTHORIZATION_FAILED")
    assert (row["change"], row["count_a"]) == ("appeared", 0)
    assert failing(document, ["errors"]) == ["errors"]
    back = compare(worse, sarama)
    assert back["changes"]["errors"][0]["change"] == "gone"
    assert failing(back, ["errors"]) == []


def test_an_error_that_appeared_by_chance(sarama: Tables) -> None:
    """One of many answers is told of, and is no worse: its p-value is 1."""
    once = changed(sarama, "exchanges", lambda table: failed(table, "Produce", 29, 10_000))
    document = compare(sarama, once)
    (row,) = document["changes"]["errors"]
    assert (row["change"], row["count_b"], row["p_value"]) == ("appeared", 1, 1.0)
    assert failing(document, ["errors"]) == []


def test_more_errors(sarama: Tables) -> None:
    """More of the same beyond chance; a few more are not told of."""
    some = changed(sarama, "exchanges", lambda table: failed(table, "Produce", 29, 20))
    more = changed(sarama, "exchanges", lambda table: failed(table, "Produce", 29, 3))
    (row,) = compare(some, more)["changes"]["errors"]
    assert row["change"] == "more"
    a_few = changed(sarama, "exchanges", lambda table: failed(table, "Produce", 29, 16))
    assert compare(some, a_few)["changes"]["errors"] == []


def test_sizes(sarama: Tables) -> None:
    """Larger requests, and larger batches of a topic."""
    grown = changed(
        sarama,
        "exchanges",
        lambda table: column(table, "request_size", pc.multiply(table["request_size"], 2)),
    )
    found = {(row["part"], row["api"]) for row in compare(sarama, grown)["changes"]["sizes"]}
    assert ("request", "Produce") in found
    assert all(part == "request" for part, _ in found)
    grown = changed(
        sarama,
        "record_batches",
        lambda table: column(table, "size", pc.multiply(table["size"], 20)),
    )
    assert {row["part"] for row in compare(sarama, grown)["changes"]["sizes"]} == {"batch"}


def test_clients(sarama: Tables) -> None:
    """Another release of the software, another principal, another address."""

    def upgraded(table: pa.Table) -> pa.Table:
        return column(
            table,
            "client_software_version",
            pc.replace_substring_regex(table["client_software_version"], "^", "9."),
        )

    document = compare(sarama, changed(sarama, "connections", upgraded))
    assert document["changes"]["clients"]
    assert all(row["fields"] == ["software"] for row in document["changes"]["clients"])


def test_configs(java: Tables) -> None:
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


def test_an_empty_side(sarama: Tables) -> None:
    """Nothing on one side: everything is gone, nothing is compared."""
    empty = Tables(
        {
            name: Table(name, pads.dataset(sarama[name].schema.empty_table()))
            for name in sarama.names
        },
        {},
    )
    document = compare(sarama, empty)
    assert document["b"]["exchange_count"] == 0
    assert document["compared"] == {"latency": [], "sizes": []}
    assert document["changes"]["errors"] == []
    assert {row["change"] for row in document["changes"]["apis"]} == {"removed"}


def test_kinds() -> None:
    """A comma list, and an error that names what there is."""
    assert parse_kinds(None) == []
    assert parse_kinds(" errors, latency ") == ["errors", "latency"]
    with pytest.raises(UnknownKind, match=r"speed.*apis, versions, clients, errors"):
        parse_kinds("errors,speed")
