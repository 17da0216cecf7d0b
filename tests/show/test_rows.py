"""`show --json` has the rows of `exchanges`, whatever the windows, in the order of their end."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

import kdissect
from kdissect.show.loop import Style, json_lines
from tests.builders.captures import read_packets, write_packets
from tests.builders.showing import shown
from tests.cases import cases
from tests.conftest import CAPTURES
from tests.material import CAPTURES as SHARED
from tests.material import key_log, needed

QUICK = (
    "java_0_10_2_2.pcap", "librdkafka.pcap", "tls13.pcap.gz", "shapes/drop1pct.pcap",
    "shapes/duplicated.pcap", "shapes/midstream.pcap",
)  # fmt: skip
HEAVY = (
    "java_2_0_1.pcap", "kafkajs.pcap.gz", "sarama.pcap.gz", "odd/odd_conversations.pcap",
    "sasl/sasl_handshake_v0.pcap", "shapes/any_sll2.pcap", "shapes/cut.pcap",
    "shapes/reordered.pcap", "shapes/seqwrap.pcap", "shapes/snap128.pcap", "shapes/vlan_vxlan.pcap",
    "tls/tls13.pcap", "zookeeper/zk_1_1_1.pcap",
)  # fmt: skip


def expected(paths: Path | list[Path], keylog: tuple[str, ...] = ()) -> list[str]:
    table = kdissect.read(paths, keylog=keylog).exchanges.to_arrow()
    return sorted(json_lines(table).decode().splitlines())


@cases("size", [6_000], heavy=[20_000, 300_000])
@cases("name", QUICK, heavy=HEAVY)
def test_rows_are_those_of_read(name: str, size: int, window_bytes: Callable[[int], None]) -> None:
    """The same columns of the same exchanges: ids, positions, packets, times, topics, errors.

    Also with gaps, other orders, other link layers, encryption and bare tokens.
    """
    window_bytes(size)
    path = needed(SHARED / name) if "/" in name else CAPTURES / name
    keylog = key_log(path)
    found = shown(path, Style(as_json=True), keylog=keylog)
    assert sorted(found) == expected(path, keylog)


def test_rotated_files_are_one_input(
    captures: Path, tmp_path: Path, window_bytes: Callable[[int], None]
) -> None:
    """Connections cross files, in whatever order the files are named."""
    window_bytes(20_000)
    packets = read_packets(captures / "java_2_0_1.pcap")
    paths = [
        write_packets(tmp_path / f"rotated_{number}.pcap", packets[200 * number :][:200])
        for number in range(5)
    ]
    assert sorted(shown(paths[::-1], Style(as_json=True))) == expected(paths)


def test_rows_come_in_the_order_of_their_end(captures: Path) -> None:
    """An exchange stands where its answer came."""
    rows = [json.loads(line) for line in shown(captures / "librdkafka.pcap", Style(as_json=True))]
    ends = [row["response_end_time"] or row["request_end_time"] for row in rows]
    open_ones = [row["status"] in ("response_missing", "connection_closed") for row in rows]
    finished = [end for end, is_open in zip(ends, open_ones, strict=True) if not is_open]
    assert finished == sorted(finished)


def test_json_of_anything_is_json() -> None:
    """Quotes, control characters, nulls, infinities of columns."""
    table = pa.table(
        {
            "client_id": ['a"b\\c\n', None, "\x1b[31m"],
            "topics": [["x", 'y"'], None, []],
            "exchange_id": [5, 2**60, None],
            "latency_ms": [0.25, None, -1.0],
        }
    )
    rows = [json.loads(line) for line in json_lines(table).decode().splitlines()]
    assert [row["client_id"] for row in rows] == ['a"b\\c\n', None, "\x1b[31m"]
    assert [row["topics"] for row in rows] == [["x", 'y"'], None, []]
    assert [row["exchange_id"] for row in rows] == [5, str(2**60), None]
    assert [row["latency_ms"] for row in rows] == [0.25, None, -1.0]
