"""The accounts of a table set: they add up, and each one fails on a set that was broken for it."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

import kdissect as package
from kdissect.accounts import accounts, check, prepared
from kdissect.api import Tables
from tests.builders.captures import lose_packets
from tests.builders.tables import Change, changed, with_column
from tests.processes import Run


def plus_one(name: str) -> Change:
    """A count of the first row is one more."""

    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        place = next(row for row, value in enumerate(values) if value)
        values[place] += 1
        return with_column(table, name, values)

    return change


def twice(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table, table.slice(0, 1)])


def without_first(table: pa.Table) -> pa.Table:
    return table.slice(1)


def no_row(table: pa.Table) -> pa.Table:
    return table.slice(0, 0)


def later(table: pa.Table) -> pa.Table:
    """All offsets are higher."""
    return with_column(table, "offset", pc.add(table["offset"], 1000))


def wrong_crc(table: pa.Table) -> pa.Table:
    return with_column(table, "crc_ok", [False] * table.num_rows)


def without(column: str, value: str) -> Change:
    """Without the rows that have a value."""
    return lambda table: table.filter(pc.not_equal(table[column], value))


def without_epochs(event: str) -> Change:
    """Without one kind of rows of groups with member epochs."""
    chosen = (pads.field("group_type") != "classic") & (pads.field("event") == event)
    return lambda table: table.filter(~chosen)


def no_reasons(table: pa.Table) -> pa.Table:
    table = plus_one("tcp_packet_count")(table)
    return with_column(table, "ignored_packet_count", [-1])


GAPS = "missing bytes are those of the gaps in anomalies"
UNFRAMED = "unframed bytes are those in anomalies"
FRAMED = "framed bytes are those of the exchanges, without the missing bytes of partial frames"
OVERLAP = "frames of a connection do not overlap"
LATENCY = "latency_ms is the time between its packets, and queued_ms + service_ms"
OFFSETS = "offsets of fetched records are within those of their batch"
PACKETS = "TCP packets are segments of connections or duplicates"
EVENTS = "joins, syncs, leaves and refusals of groups are in group_events"
GENERATIONS = "generations of groups have a rebalance and become stable in group_events"
TRANSACTIONS = "requests that a transaction consists of are in transactions"
SESSIONS = "partitions of a Fetch are in fetch_sessions at its epoch"
LISTED = "rows of fetch_sessions are partitions of their Fetch"
EPOCHS = "member epochs that groups reach have a rebalance in group_events"
STABLE_EPOCHS = "member epochs that all members reach are stable in group_events"
BROKEN: list[tuple[str, Change, str]] = [
    ("connections", plus_one("request_byte_count"), "captured bytes are framed and unframed ones"),
    ("connections", plus_one("response_missing_byte_count"), GAPS),
    ("anomalies", without("kind", "gap"), GAPS),
    ("connections", plus_one("response_unframed_byte_count"), UNFRAMED),
    ("connections", plus_one("response_framed_byte_count"), FRAMED),
    ("exchanges", plus_one("request_size"), FRAMED),
    ("captures", plus_one("packet_count"), "packets of a capture are TCP packets and ignored ones"),
    ("captures", no_reasons, "ignored packets each have a reason"),
    ("connections", plus_one("request_segment_count"), PACKETS),
    ("captures", twice, "capture_id is unique in captures"),
    ("connections", twice, "connection_id is unique in connections"),
    ("exchanges", twice, "exchange_id is unique in exchanges"),
    ("record_batches", twice, "exchange_id, batch_index is unique in record_batches"),
    ("records", twice, "exchange_id, batch_index, record_index is unique in records"),
    ("connections", without_first, "rows of exchanges have a row in connections"),
    ("exchanges", without("api_name", "Produce"), "rows of record_batches have a row in exchanges"),
    ("record_batches", without_first, "rows of records have a row in record_batches"),
    ("records", without_first, "records of a batch are as many as its record_count"),
    ("apis/Metadata", plus_one("exchange_id"), "rows of apis/<ApiName> are exchanges of that API"),
    ("apis/Metadata", without_first, "decoded exchanges have one row in apis/<ApiName>"),
    ("connections", plus_one("client_port"), "exchanges have the addresses of their connection"),
    ("exchanges", plus_one("request_size"), OVERLAP),
    ("exchanges", plus_one("latency_ms"), LATENCY),
    ("records", later, OFFSETS),
    ("group_events", without("event", "join"), EVENTS),
    ("group_events", without("event", "leave"), EVENTS),
    ("group_events", without("event", "rebalance"), GENERATIONS),
    ("group_events", without("event", "stable"), GENERATIONS),
    ("transactions", without_first, TRANSACTIONS),
    ("fetch_sessions", without_first, SESSIONS),
    ("fetch_sessions", plus_one("session_id"), LISTED),
    ("topics", no_row, "topics in Metadata are in topics"),
    ("topics", no_row, "topic ids of record batches are in topics"),
    ("brokers", without_first, "brokers in Metadata are in brokers"),
    *(
        (table, plus_one("exchange_id"), f"rows of {table} have a row in exchanges")
        for table in ("group_events", "fetch_sessions", "anomalies")
    ),
]
MANIFEST = "rows of a table are as many as the manifest says"
FEWER_ROWS = ("topics", without_first)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory, captures: Path) -> Tables:
    """A table set of a capture with gaps, unframed bytes and cut frames."""
    folder = tmp_path_factory.mktemp("accounts")
    path = lose_packets(captures / "java_2_0_1.pcap", folder / "lost.pcap", 0.05, seed=4)
    package.read(path).write(folder / "tables")
    return package.open(folder / "tables")


def test_captures_add_up(damaged: Tables, captures: Path, tmp_path: Path) -> None:
    """Two captures of which packets are missing; `truth` has whole ones, one of TLS."""
    other = lose_packets(captures / "java_2_0_1.pcap", tmp_path / "other.pcap", 0.05)
    kinds = set()
    for tables in (damaged, package.read(other)):
        assert check(tables)["faults"] == []
        kinds |= set(tables.anomalies.to_arrow()["kind"].to_pylist())
    assert {"gap", "unframed_bytes", "partial_frame"} <= kinds


@pytest.mark.parametrize(
    "selected",
    [{"from_": "2026-11-21T02:15:35Z"}, {"until": "2026-11-21T02:15:40Z"}, {"hosts": "10.9.9.9"}],
    ids=str,
)
def test_sets_of_some_times_and_hosts_add_up(selected: dict[str, str], captures: Path) -> None:
    """The counts of whole connections are not compared with the exchanges that are left."""
    document = check(package.read(captures / "librdkafka.pcap", **selected))
    assert document["faults"] == []
    assert not {FRAMED, PACKETS} & set(document["accounts"])


@pytest.mark.parametrize(("name", "change", "account"), BROKEN)
def test_each_account_fails(damaged: Tables, name: str, change: Change, account: str) -> None:
    """A set broken on purpose. `test_captures_add_up` says that the account has no row before."""
    broken = changed(damaged, name, change)
    with prepared(broken) as database:
        assert database.rows(accounts(broken)[account])


@pytest.mark.parametrize(("event", "account"), [("rebalance", EPOCHS), ("stable", STABLE_EPOCHS)])
def test_member_epochs_without_a_row(librdkafka: Tables, event: str, account: str) -> None:
    """Two epochs of a consumer group have rows that are derived from all its heartbeats."""
    faults = check(changed(librdkafka, "group_events", without_epochs(event)))["faults"]
    expected = ["group rd-new epoch 2", "group rd-new epoch 3"]
    assert [fault["place"] for fault in faults if fault["account"] == account] == expected


def test_offsets_of_a_batch_with_a_wrong_crc(damaged: Tables) -> None:
    """They are not compared: bytes of the batch changed on their way."""
    tables = changed(damaged, "records", later)
    assert OFFSETS in {fault["account"] for fault in check(tables)["faults"]}
    tables = changed(tables, "record_batches", wrong_crc)
    assert OFFSETS not in {fault["account"] for fault in check(tables)["faults"]}


def test_a_table_with_fewer_rows_than_the_manifest_says(damaged: Tables) -> None:
    """It is a fault, whatever else adds up."""
    faults = check(changed(damaged, *FEWER_ROWS))["faults"]
    assert MANIFEST in [fault["account"] for fault in faults]


def test_every_account_has_a_broken_set(damaged: Tables) -> None:
    """None is left out above."""
    names = {account for _, _, account in BROKEN} | {MANIFEST, EPOCHS, STABLE_EPOCHS}
    assert set(check(damaged)["accounts"]) == names


def test_the_command(kdissect: Run, damaged: Tables, tmp_path: Path) -> None:
    """Exit 0 where all add up; exit 1 with a line for each fault, which names its place."""
    out = tmp_path / "tables"
    damaged.write(out)
    done = kdissect("check", str(out))
    assert (done.returncode, done.stdout.split(" ", 1)[1]) == (0, "accounts add up\n")
    (path,) = (out / "connections").glob("*.parquet")
    pq.write_table(plus_one("request_byte_count")(pq.read_table(path)), path)
    done = kdissect("check", str(out))
    assert done.returncode == 1
    line, last = done.stdout.splitlines()
    assert line.startswith("captured bytes are framed and unframed ones: connection ")
    assert last.startswith("1 of ")
    document = json.loads(kdissect("check", str(out), "--json").stdout)
    assert (document["format_version"], len(document["faults"])) == (1, 1)
