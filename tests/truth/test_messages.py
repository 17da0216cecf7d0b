"""`decode_message` and `encode_message` on every frame of real conversations, cut out with dpkt."""

from collections.abc import Callable, Iterator

import kdissect
from tests.truth import definitions, packets
from tests.truth.compare import Comparison, plain
from tests.truth.matching import match
from tests.truth.material import CHECKED, Capture, each
from tests.truth.rows import Row

SHOWN = 8
API_VERSIONS = 18
SMALL = [c for c in CHECKED if not c.name.startswith("perf/")]
# brokers among each other: tests/codec encodes all versions of their messages
every_small_capture = each("capture", SMALL, repeated={"cluster/cluster"})


def _frames(capture: Capture) -> Iterator[tuple[Row, str, bytes]]:
    """Row of `exchanges`, side, and the bytes of the frame without its size prefix."""
    connections = packets.streams(capture.path)
    reused = {pair for pair, found in connections.items() if len(found) > 1}
    for row in capture.rows("exchanges"):
        pair = (row["client_ip"], row["client_port"]), (row["broker_ip"], row["broker_port"])
        if pair in reused or row["api_key"] is None:
            continue
        for side, stream in zip(("request", "response"), connections[pair][0], strict=True):
            if row[f"{side}_decode_status"] == "ok":
                start = row[f"{side}_pos"] + 4
                yield row, side, bytes(stream.data[start : start + row[f"{side}_size"]])


def _decode(row: Row, side: str, frame: bytes) -> kdissect.Message:
    if side == "request":
        return kdissect.decode_message(frame, side=side)
    return kdissect.decode_message(
        frame, side=side, api_key=row["api_key"], api_version=row["api_version"]
    )


@every_small_capture
def test_frames_decode_as_logged_and_encode_to_the_same_bytes(
    capture: Capture, say: Callable[[str], None]
) -> None:
    """Values as the broker logged them; encoded again, not a bit differs."""
    logged = {row["exchange_id"]: entry for entry, row in match(capture).pairs}
    comparison = Comparison()
    count = 0
    for row, side, frame in _frames(capture):
        message = _decode(row, side, frame)
        assert (message.api_key, message.api_name) == (row["api_key"], row["api_name"])
        assert message.header["correlation_id"] == row["correlation_id"]
        count += 1
        if kdissect.encode_message(message) != frame:
            comparison.differences.append(f"{row['api_name']} v{message.api_version}: other bytes")
        entry = logged.get(row["exchange_id"])
        if entry is None:
            continue
        log = getattr(entry, side)
        if isinstance(log, dict):
            layout = definitions.layout(row["api_key"], side.title(), message.api_version)
            comparison.body(layout, log, plain(message.body), f"{entry} {side}")
    assert not comparison.differences, comparison.differences[:SHOWN]
    say(f"{capture}: {count} messages decode as logged and encode to the bytes they came from")


def test_an_answer_to_an_unknown_version_of_api_versions_is_version_0() -> None:
    """A response with error 35 has version 0, whatever the request's (here 99)."""
    capture = Capture("odd/odd_conversations")
    fallbacks = [r for r in capture.rows("exchanges") if r["version_source"] == "fallback_v0"]
    found = [
        _decode(row, side, frame)
        for row, side, frame in _frames(capture)
        if side == "response" and row in fallbacks
    ]
    assert [message.api_version for message in found] == [0]
    assert found[0].body["error_code"] == 35


def test_a_probe_that_its_broker_answers_is_no_anomaly() -> None:
    """KIP-511: franz-go sends ApiVersions 5 first, then a version that the broker accepts."""
    tables = kdissect.read(Capture("version_sweep/sweep_4_3_1").path)
    columns = ["version_source", "request_decode_status"]
    rows = tables.exchanges.to_arrow(columns).to_pylist()
    probes = [
        row["request_decode_status"] for row in rows if row["version_source"] == "fallback_v0"
    ]
    assert len(probes) >= 10
    assert set(probes) == {"unknown_version"}
    assert tables.anomalies.to_arrow(["kind", "detail"]).to_pylist() == []
