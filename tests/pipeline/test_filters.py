"""--host, --from and --to give the matching rows of the whole capture's tables."""

import re
from datetime import UTC, date, datetime, time, timedelta

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import kdissect as package
from kdissect.pipeline.filters import host_bytes, time_ns
from tests.conftest import CAPTURES

CAPTURE = CAPTURES / "librdkafka.pcap"


def _sorted(table: pa.Table) -> pa.Table:
    return table.sort_by([("exchange_id", "ascending")])


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("2026-11-21T07:30:00Z", 1795246200 * 10**9),
        ("2026-11-21 09:30+02:00", 1795246200 * 10**9),
        ("2026-11-21T07:30:00", 1795246200 * 10**9),
        ("2026-11-21", 1795219200 * 10**9),
        ("1795246200", 1795246200 * 10**9),
        (1795246200.0, 1795246200 * 10**9),
        (datetime(2026, 11, 21, 7, 30, tzinfo=UTC), 1795246200 * 10**9),
        (date(2026, 11, 21), 1795219200 * 10**9),
        (1790000000.000029, 1790000000_000029000),
        (np.float64(1790000000.000029), 1790000000_000029000),
        (np.datetime64("2026-11-21T07:30:00.123456789"), 1795246200_123456789),
        (np.datetime64("2026-11-21"), 1795219200 * 10**9),
        (pd.Timestamp("2026-11-21T07:30:00.123456789Z"), 1795246200_123456789),
        ("2026-11-21T07:30:00.123456789Z", 1795246200_123456789),
        ("1795246200.000000001", 1795246200_000000001),
    ],
)
def test_times_as_users_give_them(text, expected_ns):
    """RFC 3339, UTC without a zone, and seconds since 1970, to the nanosecond."""
    assert time_ns(text) == expected_ns


@pytest.mark.parametrize("text", ["yesterday", "", "2026-13-01", "12:30", "-5", "1e9", "nan"])
def test_text_without_a_time_is_refused(text):
    """Other text raises ValueError."""
    with pytest.raises(ValueError, match="no time"):
        time_ns(text)


@pytest.mark.parametrize("value", [time(7, 30), [1], np.datetime64("NaT"), float("inf"), True])
def test_an_object_without_a_time_is_refused(value):
    """The line names the value."""
    text = str(value).replace("inf", "Infinity")
    with pytest.raises(ValueError, match=f"^{re.escape(repr(text))} is no time: [^\n]*$"):
        time_ns(value)


def test_a_host_name_and_an_empty_range_are_refused():
    """A host name, and an empty range of times, raise ValueError."""
    with pytest.raises(ValueError, match="no IP address"):
        host_bytes("broker-1")
    with pytest.raises(ValueError, match="no IP address"):
        package.read(CAPTURE, hosts=["broker-1"])
    with pytest.raises(ValueError, match="range of times is empty"):
        package.read(CAPTURE, from_="2026-01-02", until="2026-01-01")


def test_a_range_of_times_gives_the_exchanges_that_begin_in_it(librdkafka):
    """The rows equal those of the whole set in the range."""
    exchanges = _sorted(librdkafka.exchanges.to_arrow())
    times = pc.coalesce(exchanges["request_time"], exchanges["response_time"])
    ordered = sorted(times.to_pylist())
    first, last = ordered[len(ordered) // 3], ordered[2 * len(ordered) // 3]
    chosen = package.read(CAPTURE, from_=first, until=last)
    within = pc.and_(
        pc.greater_equal(times, pa.scalar(first, times.type)),
        pc.less(times, pa.scalar(last, times.type)),
    )
    expected = exchanges.filter(within)
    assert 0 < len(expected) < len(exchanges)
    assert _sorted(chosen.exchanges.to_arrow()) == expected
    ids = set(expected["connection_id"].to_pylist())
    connections = chosen.connections.to_arrow()
    assert ids <= set(connections["connection_id"].to_pylist())
    assert len(connections) < librdkafka.connections.num_rows
    packets = librdkafka.captures.to_arrow(["packet_count", "tcp_packet_count"])
    assert chosen.captures.to_arrow(["packet_count", "tcp_packet_count"]) == packets


def test_two_ranges_make_the_whole(librdkafka):
    """The exchanges and records of both halves are those of the librdkafka."""
    exchanges = _sorted(librdkafka.exchanges.to_arrow())
    middle = exchanges["request_time"].to_pylist()[len(exchanges) // 2] + timedelta(microseconds=1)
    parts = [package.read(CAPTURE, until=middle), package.read(CAPTURE, from_=middle)]
    for name in ("exchanges", "records"):
        counts = [part[name].num_rows for part in parts]
        assert all(counts)
        assert sum(counts) == librdkafka[name].num_rows
    both = pa.concat_tables(part.exchanges.to_arrow() for part in parts)
    # an answer is told from its request wherever that is; names are those the whole input told
    assert _sorted(both) == exchanges


def test_hosts_keep_their_connections_whole(librdkafka):
    """The capture's host gives all rows; another host gives no row."""
    every = package.read(CAPTURE, hosts=["127.0.0.1"])
    assert _sorted(every.exchanges.to_arrow()) == _sorted(librdkafka.exchanges.to_arrow())
    none = package.read(CAPTURE, hosts=["127.0.0.2", "::1"])
    assert (none.connections.num_rows, none.exchanges.num_rows, none.records.num_rows) == (0, 0, 0)
    assert none.captures.to_arrow() == every.captures.to_arrow()
