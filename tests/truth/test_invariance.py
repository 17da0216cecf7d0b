"""The same rows however run: split sizes, Spark and in process, rotation, other link layers."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest

import kdissect
from tests.cases import cases
from tests.material import CAPTURES, key_log, needs_material
from tests.truth.material import ALL, SHAPES_BASE, Capture, read, shapes
from tests.truth.rows import IDS, PACKETS, Row, as_rows, differences, set_differences, without

pytestmark = needs_material

SHAPES = CAPTURES / "shapes"
ROTATED = sorted(SHAPES.glob("rotated_*.pcap"))
SHOWN = 6

# The same packets in the same order: also times and packet numbers are those of librdkafka.pcap.
# Tests of `capture/` read every link layer and compression.
WRAPPED = ["sll2.pcap", "vlan_vxlan.pcap", "pcapng_two_interfaces.pcapng", "seqwrap.pcap"]
NANOSECONDS = ["be_ns.pcap", "pcapng_ns.pcapng"]  # their times have three more digits
# Other packets in other places: what the captures say of Kafka is the same all the same.
SHUFFLED = ["reordered.pcap", "duplicated.pcap"]
DAMAGED = ["midstream.pcap", "drop1pct.pcap", "snap128.pcap"]  # packets that are cut, or not there
TIMES = {
    *("request_time", "request_end_time", "response_time", "response_end_time"),
    *("request_time_ns", "response_time_ns", "first_time"),
}
DURATIONS = {
    *("latency_ms", "duration_ms", "queued_ms", "service_ms", "upload_ms", "download_ms"),
    "wait",  # depends on them
}


def _same(found: list[str]) -> None:
    assert not found, "\n".join(found[:SHOWN])


SOME = ("other_clients/librdkafka", "odd/odd_conversations", "sasl/sasl_handshake_v0", "tls/tls13")
MORE = ("transactions/transactions", "share_streams/share", "zookeeper/zk_1_1_1", "tls/tls12")
LARGE = ("cluster/cluster", "perf/perf_tshark")


@cases(
    ("name", "split_bytes"),
    [(name, 10_007) for name in SOME],
    heavy=[
        *((name, 10_007) for name in MORE),
        *((name, 200_000) for name in (*SOME, *MORE)),
        *((name, 1_000_003) for name in LARGE),
    ],
)
def test_split_sizes_change_nothing(name: str, split_bytes: int) -> None:
    """Connections, frames and even packets lie across splits of 10 kB."""
    path = Capture(name).path
    split = kdissect.read(
        str(path), reveal_secrets=True, split_bytes=split_bytes, keylog=key_log(path)
    )
    _same(set_differences(read(path), split))


# Rotation: tcpdump -C wrote the same packets into five files.


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "last file first"])
def test_rotated_files_are_one_capture(reverse: bool) -> None:
    """Every table and column, but for the files' own table and ids; packet numbers lead to the
    same packets."""
    rotated = read(*(reversed(ROTATED) if reverse else ROTATED))
    _same(_rotation_differences(rotated))


def _rotation_differences(rotated: Any) -> list[str]:
    whole = SHAPES_BASE.tables
    first_packets = {}
    for row in rotated.captures.to_pylist():
        what = shapes()[Path(row["path"]).name]["what"]  # "... packets 254-506"
        first_packets[row["capture_id"]] = int(re.search(r"packets (\d+)-", what)[1])
    (only,) = whole.captures.to_pylist()
    first_packets[only["capture_id"]] = 1

    def prepare(table: str, rows: list[Row]) -> list[Row]:
        if table == "captures":
            return []
        for row in rows:
            for packet, capture_id in PACKETS.items():
                if row.get(packet) is not None:
                    row[packet] += first_packets[row[capture_id]] - 1
        return without(rows, (name for name in IDS if name.endswith("capture_id")))

    return set_differences(whole, rotated, prepare)


# The same packets in other wrappings (shapes/), made from librdkafka.pcap.


@pytest.mark.parametrize("shape", WRAPPED)
def test_wrapping_changes_nothing(shape: str) -> None:
    """Link layers, formats, compression, VLAN tags and a tunnel: exchanges, bodies and records
    are the same, with their times, packets and positions."""
    _same(_kafka_differences(SHAPES / shape, drop=set()))


@pytest.mark.parametrize("shape", NANOSECONDS)
def test_nanoseconds_are_kept(shape: str) -> None:
    """Rows agree to the microsecond, and `*_time_ns` has the further digits."""
    _same(_kafka_differences(SHAPES / shape, drop=DURATIONS, in_us=True))
    for row in read(SHAPES / shape).exchanges.to_pylist():
        if row["latency_ms"] is not None:
            assert row["duration_ms"] - row["latency_ms"] >= 0
            between = row["response_time_ns"] - row["request_time_ns"]
            assert row["latency_ms"] <= between / 1e6 + 1e-6, row
    times = read(SHAPES / shape).exchanges.to_arrow()["request_time_ns"].to_pylist()
    assert any(time_ns % 1000 for time_ns in times)


@pytest.mark.parametrize("shape", SHUFFLED)
def test_reordered_and_duplicated_packets_change_nothing_of_kafka(shape: str) -> None:
    """Times and packet numbers are those of other packets; all else is the same."""
    _same(_kafka_differences(SHAPES / shape, drop=TIMES | DURATIONS | PACKETS.keys()))


def test_duplicates_keep_the_times_of_the_first_copies() -> None:
    """Duplicated packets change no time and no duration."""
    _same(_kafka_differences(SHAPES / "duplicated.pcap", drop=set(PACKETS)))


@pytest.mark.parametrize("shape", DAMAGED)
def test_damaged_copies_show_nothing_that_was_not_sent(shape: str) -> None:
    """Each whole message is one of the undamaged capture: its connection, side, id and size."""

    def messages(tables: Any) -> set[tuple[Any, ...]]:
        return {
            (row["client_port"], side, row["correlation_id"], row[f"{side}_size"])
            for row in tables.exchanges.to_pylist()
            for side in ("request", "response")
            if row[f"{side}_decode_status"] not in ("absent", "partial")
        }

    damaged = messages(read(SHAPES / shape))
    assert damaged
    assert damaged <= messages(SHAPES_BASE.tables)


def _kafka_differences(path: Path, drop: set[str], in_us: bool = False) -> list[str]:
    ours, theirs = SHAPES_BASE.tables, read(path)
    dropped = frozenset(drop)
    if sorted(ours.names) != sorted(theirs.names):
        return [f"tables: {sorted(set(ours.names) ^ set(theirs.names))} only in one"]
    found = []
    for name in ours.names:
        if name.startswith(("apis/", "internal/")) or name in (
            *("exchanges", "records", "record_batches", "topics", "brokers"),
        ):
            left, right = (_named(tables, name, dropped, in_us) for tables in (ours, theirs))
            found += differences(name, left, right)
    return found


@functools.cache
def _places(tables: Any) -> dict[int, tuple[int, ...]]:
    """Exchange id -> its place in the conversation."""
    exchanges = tables.exchanges.to_pylist()
    places = {
        row["exchange_id"]: tuple(
            row[name] for name in ("client_port", "broker_port", "request_pos", "response_pos")
        )
        for row in exchanges
    }
    assert len(set(places.values())) == len(exchanges)
    return places


@functools.lru_cache(maxsize=100)  # those of the capture that all shapes are compared with stay
def _named(tables: Any, table: str, drop: frozenset[str], in_us: bool) -> list[Row]:
    """Rows with places in the conversation for ids: ids are made of the inputs."""
    places = _places(tables)
    rows = as_rows(tables[table].to_arrow())
    for row in rows:
        if "exchange_id" in row:
            row["place"] = places[row["exchange_id"]]
        for side in ("request", "response"):
            if in_us and row.get(f"{side}_time_ns") is not None:
                row[f"{side}_time_ns"] //= 1000
    return without(rows, {*IDS, *drop})


# Many captures at once.


def test_captures_read_together_do_not_mix() -> None:
    """Other clusters on the same addresses, one after the other: the rows of each, and no more."""
    captures = [
        *(c for c in ALL if c.name.startswith(("old_clients/", "zookeeper/", "odd/"))),
        Capture("sasl/sasl_handshake_v0"),
    ]
    together = read(*(capture.path for capture in captures))
    for name in ("captures", "connections", "exchanges", "record_batches", "anomalies"):
        # what a topic's name or id is follows from all captures, which reuse names
        learnt = {"topics", "topic", "topic_id"}
        alone = [row for capture in captures for row in capture.rows(name)]
        found = as_rows(together[name].to_arrow())
        if name == "captures":
            alone, found = without(alone, ["ignored_reasons"]), without(found, ["ignored_reasons"])
        _same(differences(name, without(found, learnt), without(alone, learnt)))


def test_packets_captured_twice_count_once() -> None:
    """The same traffic on two interfaces, in two files: one set of exchanges, half duplicates."""
    both = read(SHAPES_BASE.path, SHAPES / "sll2.pcap")
    taken = [row["duplicate_packet_count"] for row in both.captures.to_pylist()]
    assert sum(taken) == SHAPES_BASE.check["packets"]
    drop = {*IDS, *PACKETS}
    for name in ("exchanges", "records", "record_batches", "apis/Fetch"):
        ours, theirs = (
            without(as_rows(tables[name].to_arrow()), drop) for tables in (both, SHAPES_BASE.tables)
        )
        _same(differences(name, ours, theirs))
