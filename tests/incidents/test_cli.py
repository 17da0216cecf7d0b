"""`kdissect incidents`: its lines, its JSON document and its exit codes."""

import json
import shlex
from pathlib import Path

import pytest

import kdissect
from kdissect.api import selected
from kdissect.pipeline.selection import Selection
from tests.builders.tables import at, connection, exchange, tables
from tests.conftest import ROOT
from tests.console import run_here

REFUSED = {
    "api_name": "SaslAuthenticate",
    "error_code": 58,
    "error_name": "SASL_AUTHENTICATION_FAILED",
    "error_codes": [58],
}
WITHOUT_EXCHANGES = ("incidents/certificate_expired.pcap.gz", "incidents/tls_to_plaintext.pcap.gz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table set with a login loop."""
    folder = tmp_path_factory.mktemp("incidents")
    exchanges = [exchange(n, at_us=n * 1_000_000, **REFUSED) for n in range(5)]
    tables(exchanges=exchanges, connections=[connection()]).write(folder / "tables")
    return folder


def test_an_empty_table_set_has_no_incidents(tmp_path: Path) -> None:
    """One line says so."""
    tables().write(tmp_path / "tables")
    assert run_here("kdissect incidents tables", tmp_path) == "No incidents found\n"


def test_json_is_one_document(folder: Path) -> None:
    """Ids are texts, and times are RFC 3339."""
    document = json.loads(run_here("kdissect incidents tables --json", folder))
    (row,) = document["incidents"]
    assert document["format_version"] == 1
    assert row["evidence"]["exchange_ids"] == ["0", "1", "2", "3", "4"]
    assert row["start_time"] == "2026-09-21T14:13:20.000000Z"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("", 0),
        ("--fail-on broker_stall", 0),
        ("--fail-on broker_stall,login_failures", 1),
        ("--fail-on broker_stall --fail-on bad", 1),
        ("--fail-on info", 1),
    ],
)
def test_fail_on_decides_the_exit_code(folder: Path, options: str, code: int) -> None:
    """A kind, or a severity and above, gives exit code 1."""
    text = run_here(f'kdissect incidents tables -q {options}; echo "exit $?"', folder)
    assert text == f"exit {code}\n"


@pytest.mark.parametrize("is_set", [False, True])
def test_commands_show_the_incidents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    """They read all captures, with the key log and the port, or the set.

    Of a connection without exchanges they show its row.
    """
    monkeypatch.chdir(ROOT)
    names = ("java_2_0_1.pcap", "incidents/port_refuses.pcap.gz", *WITHOUT_EXCHANGES)
    paths = [f"captures/{name}" for name in names]
    key_log = "captures/tls13.keylog"
    read = {*paths, "--port", "9092", "--keylog", key_log}
    source = " ".join([*paths, "--port 9092 --keylog", key_log])
    if is_set:
        source = str(tmp_path / "tables")
        kdissect.read(paths, ports=9092, keylog=key_log).write(source)
    found = run_here(f"kdissect incidents {source}", ROOT).splitlines()
    commands = [line[8:] for line in found if line.startswith("      $ ")]
    for command in commands:
        is_query = command.startswith("kdissect sql ")
        assert ({source} if is_set and is_query else read) < set(shlex.split(command))
        shown = [line for line in run_here(command, ROOT).splitlines() if line[:9] != "kdissect:"]
        assert len(shown) > (2 if is_query else 0), command
    assert any("kdissect show" in command for command in commands)
    looks = [command for command in commands if " 'from connections where " in command]
    assert len(looks) == len(WITHOUT_EXCHANGES)


def test_commands_name_the_folder_of_many_captures(tmp_path: Path) -> None:
    paths = sorted(map(str, (ROOT / "captures" / "incidents").glob("*.gz")))[:9]
    read = kdissect.read(paths)
    read.write(tmp_path / "set")
    for each in read, kdissect.open(tmp_path / "set"):
        commands = each.incidents().to_arrow()["next_command"].to_pylist()
        shown = [command for command in commands if command.startswith("kdissect show")]
        folder = ROOT / "captures" / "incidents"
        assert shown
        assert all(command.startswith(f"kdissect show {folder} --") for command in shown)


def test_sql_queries_the_incidents(folder: Path) -> None:
    """The table is a view like the others."""
    query = "select kind, request_count from incidents"
    expected = ["kind,request_count", "login_failures,5"]
    assert run_here(f'kdissect sql tables "{query}" --format csv', folder).splitlines() == expected


LOGINS, HANDSHAKE = ("bad", "login_failures"), ("warn", "tls_failure")


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(clients=("app",)), [LOGINS, HANDSHAKE]),
        (Selection(clients=("slow",)), [HANDSHAKE]),  # no stall: others had their answers
        (Selection(errors=True), [LOGINS, HANDSHAKE]),
        (Selection(time_from_ns=at(3) * 1000), [LOGINS, HANDSHAKE]),
        (Selection(time_from_ns=at(9) * 1000), [HANDSHAKE]),
        (Selection(time_to_ns=at(-1) * 1000), []),
    ],
)
def test_incidents_of_a_selection(selection: Selection, expected: list[tuple[str, str]]) -> None:
    """They are those of the whole set, without those of other clients and other times."""
    slow = {"connection_id": 2, "client_id": "slow", "client_ip": "10.0.0.2"}
    exchanges = [
        *[exchange(n, second=n, **REFUSED if n < 5 else {}) for n in range(20)],
        exchange(100, second=8, request_packet=17, response_packet=17, **slow),
        exchange(101, second=10, latency_us=3_000_000, api_name="Produce", **slow)
        | {"request_packet": 21, "response_packet": 27},
    ]
    hello = connection(
        3, is_kafka=False, is_tls=True, client_ids=[], request_byte_count=100, closed_by="broker"
    )
    connections = [connection(), connection(2, client_ids=["slow"]), hello]
    rows = selected(tables(connections=connections, exchanges=exchanges), selection).incidents()
    found = [(row["severity"], row["kind"]) for row in rows.to_pylist()]
    assert [one for one in found if one[0] != "info"] == expected
