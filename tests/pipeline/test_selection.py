"""Selection, compared with pandas on the rows of `read`."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

import kdissect
from kdissect.api import selected
from kdissect.cli import app
from kdissect.pipeline.filters import time_ns
from kdissect.pipeline.selection import ConnectionName, Selection, api_keys, duration_ms
from kdissect.show.loop import Style
from tests.builders.showing import shown
from tests.conftest import CAPTURES

PATH = CAPTURES / "librdkafka.pcap"


@pytest.fixture(scope="module")
def rows(librdkafka: kdissect.Tables) -> pd.DataFrame:
    return librdkafka.exchanges.to_pandas()


def ids(selection: Selection) -> set[int]:
    found = [json.loads(line) for line in shown(PATH, Style(as_json=True), selection)]
    assert len(found) == len({row["exchange_id"] for row in found})
    return {int(row["exchange_id"]) for row in found}


def of(rows: pd.DataFrame, mask: Any) -> set[int]:
    chosen = set(rows["exchange_id"][mask])
    assert chosen
    assert len(chosen) < len(rows)
    return chosen


def test_exchanges_are_selected_by_api(rows: pd.DataFrame) -> None:
    """Several are alternatives; names in any case, unique beginnings, keys."""
    selection = Selection(apis=frozenset().union(*map(api_keys, ("fetch", "JOINGR", "3"))))
    assert ids(selection) == of(rows, rows.api_name.isin(["Fetch", "JoinGroup", "Metadata"]))


def test_apis_by_pattern() -> None:
    """* and ? fit anything, in any case; raw SASL tokens have no key of Kafka's."""
    assert api_keys("*TXN") == {24, 25, 26}
    assert api_keys("F?TCH") == {1}
    assert api_keys("sasl*") == {17, 36, -1}
    with pytest.raises(ValueError, match=r"'\*fetsh'; did you mean Fetch"):
        api_keys("*fetsh")


def test_exchanges_are_selected_by_client(rows: pd.DataFrame) -> None:
    """An id, a pattern, an address with its port."""
    assert ids(Selection(clients=("rd-c0",))) == of(rows, rows.client_id == "rd-c0")
    assert ids(Selection(clients=("rdkafka-*",))) == of(
        rows, rows.client_id.fillna("").str.startswith("rdkafka-")
    )
    port = int(rows.client_port.iloc[30])
    found = ids(Selection(clients=(f"127.0.0.1:{port}",)))
    assert found == of(rows, rows.client_port == port)
    assert ids(Selection(clients=("127.0.0.1",))) == set(rows.exchange_id)


def test_exchanges_are_selected_by_topic_and_group(rows: pd.DataFrame) -> None:
    """Any topic of the exchange; group or transaction."""
    has = rows.topics.map(lambda names: "rd-tx" in list(names))
    assert ids(Selection(topics=("rd-tx",))) == of(rows, has)
    either = (rows.group_id == "rd-classic") | (rows.transactional_id == "rd-tx-1")
    assert ids(Selection(groups=("rd-classic", "rd-tx-1"))) == of(rows, either)


def test_exchanges_are_selected_by_errors_and_service_time(rows: pd.DataFrame) -> None:
    """Errors anywhere in the answer; the broker's time from a bound on, without the queue."""
    wrong = rows.error_codes.map(lambda codes: len(codes) > 0)
    assert ids(Selection(errors=True)) == of(rows, wrong)
    assert ids(Selection(slow_ms=duration_ms("20ms"))) == of(rows, rows.service_ms >= 20)
    assert (rows.service_ms >= 20).sum() < (rows.latency_ms >= 20).sum()
    assert ids(Selection(errors=True, slow_ms=2)) == of(rows, wrong & (rows.service_ms >= 2))


def test_exchanges_are_selected_by_time_and_host(rows: pd.DataFrame) -> None:
    """The range is that of `dissect`: its first byte, the end not in it."""
    first, last = "2026-11-21T02:15:32Z", "2026-11-21T02:15:40Z"
    inside = (rows.request_time >= first) & (rows.request_time < last)
    selection = Selection(time_from_ns=time_ns(first), time_to_ns=time_ns(last))
    assert ids(selection) == of(rows, inside)
    assert ids(Selection(hosts=("10.0.0.1",))) == set()
    assert ids(Selection(hosts=("127.0.0.1",))) == set(rows.exchange_id)


def test_exchanges_are_selected_by_connection(rows: pd.DataFrame) -> None:
    """By its id, by either end."""
    row = rows.iloc[50]
    same = rows.connection_id == row.connection_id
    for name in (str(row.connection_id), f"127.0.0.1:{row.client_port}"):
        assert ids(Selection(connections=(ConnectionName.of(name),))) == of(rows, same)
    broker = rows.broker_port == 9093
    assert ids(Selection(connections=(ConnectionName.of("127.0.0.1:9093"),))) == of(rows, broker)


def test_exchanges_are_selected_by_sql(rows: pd.DataFrame) -> None:
    """An expression over columns, lists and strings too."""
    where = "latency_ms > 1 and list_contains(topics, 'rd-events') and client_id like 'rd-%'"
    mask = (
        (rows.latency_ms > 1)
        & rows.topics.map(lambda names: "rd-events" in list(names))
        & rows.client_id.fillna("").str.startswith("rd-")
    )
    assert ids(Selection(where=where)) == of(rows, mask)
    late = "request_time >= '2026-11-21 02:15:40+00'"
    assert ids(Selection(where=late)) == of(rows, rows.request_time >= "2026-11-21T02:15:40Z")


@pytest.mark.parametrize("text", ["", "x", "1.2.3.4", "1.2.3.4:0", "host:9092", "-4", "9" * 25])
def test_wrong_connections_are_refused(text: str) -> None:
    """Neither an id nor an end."""
    with pytest.raises(ValueError, match=r"neither|no IP address"):
        ConnectionName.of(text)


def test_unknown_and_ambiguous_apis_are_refused() -> None:
    """An unknown or ambiguous API is refused with similar names."""
    with pytest.raises(ValueError, match="Fetch"):
        api_keys("Fetsch")
    with pytest.raises(ValueError, match="DescribeGroups"):
        api_keys("describe")
    assert api_keys("SaslToken") == {-1}


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_tables_of_a_selection(
    rows: pd.DataFrame, librdkafka: kdissect.Tables, is_on_disk: bool, tmp_path: Path
) -> None:
    """Rows of these exchanges and their connections, for pyarrow and for DuckDB."""
    tables = librdkafka.write(tmp_path / "tables") if is_on_disk else librdkafka
    chosen = selected(tables, Selection(topics=("RD-TX",), where="api_name <> 'Metadata'"))
    has = rows.topics.map(lambda names: "rd-tx" in list(names)) & (rows.api_name != "Metadata")
    expected = of(rows, has)
    assert set(chosen.exchanges.to_pandas()["exchange_id"]) == expected
    assert set(chosen.connections.to_pandas()["connection_id"]) == set(rows[has]["connection_id"])
    for name in ("api_produce", "record_batches", "records", "group_events", "exchanges"):
        count = chosen.sql(f"select count(*) n from {name}").to_arrow()["n"][0].as_py()
        whole = tables.sql(f"select exchange_id from {name}").to_arrow()["exchange_id"].to_pylist()
        assert count == sum(ident in expected for ident in whole), name
    assert (
        0
        < len(chosen.transactions)
        == len(
            [ids for ids in tables.transactions.to_pandas()["exchange_ids"] if expected & set(ids)]
        )
    )
    assert chosen.topics.num_rows == tables.topics.num_rows
    assert chosen.manifest["totals"]["exchanges"] == len(expected)
    assert chosen.manifest["totals"]["packets"] == tables.manifest["totals"]["packets"]


def test_a_selection_of_a_report_and_a_summary(tmp_path: Path) -> None:
    """Report and summary select the exchanges of `show`, and warn if there are no such."""
    expected = len(ids(Selection(errors=True, clients=("RD-C?",))))
    for verb in ("summary", "report"):
        options = ["--errors", "--client", "RD-C?", "--json"]
        options += ["--out", str(tmp_path / "x.html"), "--no-csv"] if verb == "report" else []
        done = CliRunner().invoke(app, [verb, str(PATH), *options])
        document = json.loads(done.stdout)
        totals = document.get("totals") or document["overview"]
        assert totals["exchanges"] == expected > 0
    done = CliRunner().invoke(app, ["summary", str(PATH), "--topic", "nosuch"])
    assert "0 of 319 exchanges pass the filters" in done.stderr
