"""TLS captures: decrypted and closed connections, and equal rows of every kind of run."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kdissect
from tests.builders.captures import file_bytes, split_capture
from tests.cases import cases
from tests.material import CAPTURES, key_log, needs_material
from tests.truth.material import Capture, each, read
from tests.truth.rows import Row, as_rows, set_differences, without

TLS_12, TLS_13 = Capture("tls/tls12"), Capture("tls/tls13")
both = pytest.mark.parametrize("capture", [TLS_12, TLS_13], ids=str, scope="module")
every_capture = each("capture", [TLS_12, TLS_13])
CAPTURE_IDS = ("capture_id", "request_capture_id", "response_capture_id")


def _rows(tables: Any, name: str) -> list[Row]:
    return as_rows(tables[name].to_arrow())


@both
def test_every_tls_connection_is_decrypted(capture: Capture) -> None:
    """Each connection with a secret is Kafka after decryption."""
    version = {TLS_12: "TLSv1.2", TLS_13: "TLSv1.3"}[capture]
    rows = [row for row in capture.rows("connections") if row["is_tls"]]
    with_keys = sum(
        line.startswith(("CLIENT_RANDOM", "CLIENT_TRAFFIC")) for line in _lines(capture)
    )
    assert len(rows) == with_keys
    for row in rows:
        assert row["is_kafka"], row
        assert row["tls_version"] == version
        assert row["tls_cipher"].startswith("TLS_")
        assert row["tls_certificate_names"] == ["localhost", "127.0.0.1", "::1"]
        assert row["tls_certificate_subject"] == "CN=localhost"
        assert row["tls_certificate_issuer"] == "CN=lab-ca"
        assert row["tls_certificate_not_before"] < row["first_time"]
        assert row["first_time"] < row["tls_certificate_not_after"]
        for side in ("request", "response"):
            assert row[f"{side}_unframed_byte_count"] == 0, row
            assert row[f"{side}_framed_byte_count"] == row[f"{side}_byte_count"] > 0, row
    assert all(row["broker_port"] == 9095 for row in rows)


def _lines(capture: Capture) -> list[str]:
    return Path(*key_log(capture.path)).read_text().splitlines()


@needs_material
def test_secrets_inside_a_pcapng_are_used() -> None:
    """tls_dsb.pcapng is tls13.pcap with its key log inside: the same rows."""
    inside = read(CAPTURES / "shapes" / "tls_dsb.pcapng")

    def prepare(name: str, rows: list[Row]) -> list[Row]:
        return [] if name == "captures" else without(rows, CAPTURE_IDS)

    assert not set_differences(inside, TLS_13.tables, prepare)


@every_capture
def test_without_keys_connections_are_named_and_counted(capture: Capture) -> None:
    """The same connections are TLS without frames."""
    closed = kdissect.read(str(capture.path), reveal_secrets=True)
    opened = {row["connection_id"]: row for row in capture.rows("connections")}
    tls = {row["connection_id"] for row in _rows(closed, "connections") if row["is_tls"]}
    assert tls == {key for key, row in opened.items() if row["is_tls"]}
    for row in _rows(closed, "connections"):
        if row["connection_id"] not in tls:
            continue
        assert (row["protocol"], row["is_kafka"]) == ("tls", False)
        for side in ("request", "response"):
            assert row[f"{side}_framed_byte_count"] == 0
            assert row[f"{side}_byte_count"] == opened[row["connection_id"]][f"{side}_byte_count"]
    assert not tls & {row["connection_id"] for row in _rows(closed, "exchanges")}
    assert not tls & {row["connection_id"] for row in _rows(closed, "anomalies")}


@every_capture
def test_lines_taken_out_of_the_key_log(capture: Capture, tmp_path: Path) -> None:
    """Connections without their key log lines are reported; the others give the same rows."""
    lines = _lines(capture)
    sessions = list(dict.fromkeys(line.split()[1] for line in lines if line.startswith("CLIENT_")))
    gone = set(sessions[::3])
    log = tmp_path / "some.keylog"
    kept = [line for line in lines if line.split()[1] not in gone]
    log.write_text("\n".join(kept))
    some = kdissect.read(str(capture.path), reveal_secrets=True, keylog=log)
    reported = [row for row in _rows(some, "anomalies") if row["kind"] == "not_decrypted"]
    assert len(reported) == len(gone)
    assert {row["detail"] for row in reported} == {
        "no key log has the secret of this TLS connection"
    }
    closed = {row["connection_id"] for row in reported}
    for row in _rows(some, "connections"):
        if row["connection_id"] in closed:
            assert (row["protocol"], row["is_tls"], row["is_kafka"]) == ("tls", True, False)
    expected = {
        row["exchange_id"]
        for row in capture.rows("exchanges")
        if row["connection_id"] not in closed
    }
    assert {row["exchange_id"] for row in _rows(some, "exchanges")} == expected


@every_capture
@cases("share", [0.05], heavy=[0.01])
def test_lost_packets_lose_what_they_touch(
    capture: Capture, share: float, tmp_path: Path, say: Any
) -> None:
    """With a captured hello most exchanges are found, and none is made up."""
    rng = random.Random(int(share * 100))
    head, packets = split_capture(file_bytes(capture.path))
    kept = {number for number in range(1, len(packets) + 1) if rng.random() >= share}
    path = tmp_path / "thinned.pcap"
    path.write_bytes(head + b"".join(packets[number - 1] for number in sorted(kept)))
    tables = kdissect.read(str(path), reveal_secrets=True, keylog=key_log(capture.path))

    def key(row: Row) -> tuple[Any, ...]:
        names = ("client_port", "broker_port", "correlation_id", "api_key", "api_version")
        return (*(row[name] for name in names), row["client_id"], row["request_size"])

    whole = Counter(key(row) for row in capture.rows("exchanges"))
    found = [row for row in _rows(tables, "exchanges") if row["request_decode_status"] == "ok"]
    assert not Counter(map(key, found)) - whole
    closed = {
        (row["client_port"], row["broker_port"])
        for row in _rows(tables, "connections")
        if not row["is_kafka"]
    }
    hoped = [
        row
        for row in capture.rows("exchanges")
        if (row["client_port"], row["broker_port"]) not in closed and row["request_packet"] in kept
    ]
    say(f"{capture}: {len(found)} of {len(hoped)} requests at {share:.0%} loss")
    assert len(found) >= 0.97 * len(hoped)
