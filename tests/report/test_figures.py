"""The main figures of the page agree with its sections."""

import re
from typing import Any

import pytest

from kdissect.protocol.api_keys import ApiKey
from kdissect.report import page
from kdissect.report.sections import overview
from tests.builders.tables import Row, connection, exchange, tables
from tests.report.documents import document_of


def _document(*exchanges: Row, connections: tuple[Row, ...] = ()) -> dict[str, Any]:
    return document_of(tables(exchanges=exchanges, connections=connections or (connection(),)))


def _tile(document: dict[str, Any], label: str) -> dict[str, str]:
    """A main figure of the page: its value, note and level."""
    shown = {"source": "x", **document, "incidents": []}
    html = page.render(shown, [overview.section(document)], {})
    tile = re.search(
        rf'<div title="[^"]+"><dt>{label}</dt><dd(?: class="(?P<level>\w+)")?>'
        r"(?P<value>.*?)(?:<small>(?P<note>.*?)</small>)?</dd></div>",
        html,
    )
    assert tile is not None
    return tile.groupdict("")


@pytest.mark.parametrize(
    ("api_key", "api", "api_version", "level"),
    [
        (ApiKey.PRODUCE, "Produce", 2, "warn"),
        (ApiKey.SHARE_GROUP_HEARTBEAT, "ShareGroupHeartbeat", 1, ""),
    ],
)
def test_readiness_is_about_what_a_release_no_longer_takes(
    api_key: ApiKey, api: str, api_version: int, level: str
) -> None:
    """Both clients would break on 4.0; the second needs what 4.0 does not have yet."""
    request = exchange(
        1, api_key=int(api_key), api_name=api, api_version=api_version, request_pos=0,
        version_source="request_header",
    )  # fmt: skip
    document = _document(request, connections=(connection(handshake_seen=True),))
    assert document["readiness"]["counts"]["breaks"] == 1
    assert _tile(document, "Break on Kafka 4.0")["level"] == level


def test_one_figure_for_errors() -> None:
    """Routine steps of the protocol are no errors, wherever the page counts them."""
    codes = {"Fetch": 1, "Produce": 6, "JoinGroup": 79}
    document = _document(
        *(
            exchange(n, api_name=api, error_code=codes[api], error_codes=[codes[api]])
            for n, api in enumerate(["Fetch", "Produce", "Produce", "JoinGroup"])
        )
    )
    assert document["overview"]["failed"] == document["errors"]["exchanges"] == 3
    assert sum(row["errors"] for row in document["latency"]["apis"]["rows"]) == 3
    assert sum(row["errors"] for row in document["clients"]["rows"]) == 3
    assert document["errors"]["routine"] == 1
    assert _tile(document, "Errors")["value"] == "3"


def test_what_was_not_read_passes_no_check() -> None:
    """TLS that was not decrypted, and connections without responses, may hide errors."""
    tls = {"is_kafka": False, "is_tls": True, "protocol": "tls", "request_byte_count": 450}
    whole = connection(1, request_byte_count=100, request_framed_byte_count=100)
    document = _document(
        exchange(1), connections=(whole, connection(2, **tls), connection(3, **tls))
    )
    read = _tile(document, "Read")
    assert (read["value"], read["level"]) == ("10.0 %", "warn")
    assert read["note"] == "2 TLS connections not decrypted"
    assert document["clear"] == []
    half = connection(request_segment_count=9)
    assert _document(exchange(1, latency_us=None), connections=(half,))["clear"] == []


def test_figures_agree_on_the_page(document: dict[str, Any]) -> None:
    """Tiles and tables show the same numbers."""
    (kafka,) = (row for row in document["overview"]["protocols"] if row["protocol"] == "kafka")
    read = document["overview"]["read"]
    assert read["request_bytes"] + read["response_bytes"] == kafka["bytes"]
    assert _tile(document, "Topics")["value"] == str(document["topics"]["topics"]["total"])
    assert _tile(document, "Read")["value"] == "100 %"
    for incident in document["incidents"]:
        assert incident["next_command"]
        assert incident["start_time"]
