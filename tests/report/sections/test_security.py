"""The section on security: logins by principal and mechanism, against what brokers logged."""

from collections import Counter, defaultdict
from typing import Any

import pytest

from kdissect.report.sections import clients
from tests.builders.tables import Row, connection, exchange, tables
from tests.material import needs_material
from tests.report.documents import OPTIONS, prepared
from tests.truth.material import Capture
from tests.truth.request_log import read_lines


def _logins(**rows: Any) -> list[Row]:
    with prepared(tables(**rows)) as database:
        logins: list[Row] = clients.collect_security(database, OPTIONS)["logins"]["rows"]
        return logins


def _step(number: int, api: str, key: int, **values: Any) -> Row:
    return exchange(number, connection_id=number // 10, api_name=api, api_key=key) | values


def test_outcomes_of_logins() -> None:
    """An answer to another request proves success, an error proves failure, else it is open."""
    user = {"sasl_mechanism": "PLAIN", "principal": "User:alice"}
    refused = {"error_code": 58, "error_name": "SASL_AUTHENTICATION_FAILED"}
    (row,) = _logins(
        connections=[connection(number, **user) for number in (1, 2, 3)],
        exchanges=[
            _step(10, "SaslAuthenticate", 36),
            _step(11, "Metadata", 3),
            _step(20, "SaslAuthenticate", 36, **refused),
            _step(30, "SaslAuthenticate", 36),
            _step(31, "ApiVersions", 18),
        ],
    )
    counts = [row[name] for name in ("connections", "accepted", "refused", "undecided")]
    assert counts == [3, 1, 1, 1]
    assert row["errors"] == ["SASL_AUTHENTICATION_FAILED"]
    assert (row["principal"], row["sasl_mechanism"]) == ("User:alice", "PLAIN")


def test_a_token_without_a_header_that_got_no_answer() -> None:
    """The broker closes the connection of a wrong password; if the client does, it is open."""
    token = {"api_key": None, "status": "connection_closed", "response_time": None}
    sides = {1: "broker", 2: "client"}
    (row,) = _logins(
        connections=[connection(number, closed_by=side) for number, side in sides.items()],
        exchanges=[_step(10 * number, "SaslToken", 0) | token for number in sides],
    )
    assert (row["refused"], row["undecided"]) == (1, 1)


@needs_material
@pytest.mark.parametrize("name", ["sasl/sasl", "sasl/sasl_handshake_v0"])
def test_logins_of_recorded_captures(name: str) -> None:
    """Each logged user has as many accepted connections as the log has ports of the user."""
    capture = Capture(name)
    ports = defaultdict(set)
    for entry in read_lines(capture.request_log_path):
        is_login = entry["api_key"] in (17, 18, 36) or entry["principal"] == "User:ANONYMOUS"
        if not is_login and not entry["forwarded"]:
            ports[entry["principal"]].add(tuple(entry["client"]))
    with prepared(capture.tables) as database:
        rows = clients.collect_security(database, OPTIONS)["logins"]["rows"]
    accepted: Counter[str] = Counter()
    for row in rows:
        accepted[row["principal"]] += row["accepted"]
        mechanisms = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
        assert row["sasl_mechanism"] in mechanisms
        assert row["connections"] == row["accepted"] + row["refused"]
    assert +accepted == {user: len(clients) for user, clients in ports.items()}
