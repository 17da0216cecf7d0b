"""Plots have the values of the tables, in few marks, and each one renders."""

import pytest

import kdissect
from kdissect.plot import SEQUENCE_MAX
from tests.conftest import CAPTURES

pytest.importorskip("altair", reason="Altair is not installed: pip install 'kdissect[notebook]'")


@pytest.fixture(scope="module")
def tables() -> kdissect.Tables:
    return kdissect.read([CAPTURES / "librdkafka.pcap", CAPTURES / "sarama.pcap.gz"])


def _drawn(chart) -> dict:
    """The chart as Vega: it compiles, and has marks."""
    import vl_convert

    assert vl_convert.vegalite_to_svg(chart.to_json()).startswith("<svg")
    return chart.to_dict()


def _rows(chart) -> list[dict]:
    (rows,) = chart.to_dict()["datasets"].values()
    return rows


@pytest.mark.parametrize("by", ["api_name", "client_id", "client_ip"])
def test_a_timeline_counts_every_request_once(tables, by):
    """Sums of requests, bytes and errors equal the table's."""
    chart = tables.plot.timeline(by)
    _drawn(chart)
    assert sum(row["value"] for row in _rows(chart)) == tables.exchanges.num_rows
    exchanges = tables.exchanges.to_pandas()
    moved = exchanges.request_size.fillna(0).sum() + exchanges.response_size.fillna(0).sum()
    assert sum(row["value"] for row in _rows(tables.plot.timeline(by, "bytes"))) == moved
    errors = int((exchanges.error_code.fillna(0) != 0).sum())
    assert sum(row["value"] for row in _rows(tables.plot.timeline(by, "errors"))) == errors > 0


def test_latency_has_a_row_per_api_with_its_percentiles(tables):
    """Counts and quantiles equal those that pandas computes."""
    chart = tables.plot.latency()
    _drawn(chart)
    answered = tables.exchanges.to_pandas().dropna(subset=["service_ms"])
    fetches = answered[(answered.api_name == "Fetch") & (answered.wait == "long_poll")]
    of_fetch = fetches[fetches.service_ms > 0].service_ms
    row = next(row for row in _rows(chart) if row["name"] == "Fetch (long poll)")
    assert row["answers"] == len(of_fetch)
    assert row["p50"] == pytest.approx(of_fetch.median())
    assert row["p95"] == pytest.approx(of_fetch.quantile(0.95))


def test_who_writes_to_which_topic(tables):
    """Records and bytes equal the sums over produced batches."""
    chart = tables.plot.topics_by_client()
    _drawn(chart)
    batches = tables.record_batches.to_pandas()
    produced = batches[batches.source == "produce"]
    assert sum(row["records"] for row in _rows(chart)) == produced.record_count.sum()
    assert sum(row["bytes"] for row in _rows(chart)) == produced["size"].sum()
    assert {row["topic"] for row in _rows(chart)} == set(produced.topic)
    with pytest.raises(ValueError, match="records or bytes"):
        tables.plot.topics_by_client("weight")


def test_a_group_has_a_row_per_member(tables):
    """Each event of the group is in the lane of its member."""
    chart = tables.plot.group("rd-classic")
    _drawn(chart)
    events = tables.group_events.to_pandas()
    events = events[events.group_id == "rd-classic"]
    assert len(_rows(chart)) == len(events)
    assert set(events.member_id.dropna()) - {""} <= {row["lane"] for row in _rows(chart)}
    _drawn(tables.plot.group())
    with pytest.raises(KeyError, match="no group 'absent'; there are"):
        tables.plot.group("absent")


def test_a_sequence_diagram_has_an_arrow_each_way(tables):
    """Each captured request and response is an arrow."""
    chart = tables.plot.sequence()
    _drawn(chart)
    exchanges = tables.exchanges.to_pandas()
    largest = exchanges.groupby("connection_id").size().sort_values().index[-1]
    own = exchanges[exchanges.connection_id == largest].sort_values("request_time_ns")
    own = own.head(SEQUENCE_MAX)
    arrows = own.request_time_ns.notna().sum() + own.response_time_ns.notna().sum()
    assert len(_rows(chart)) == arrows
    assert {row["exchange_id"] for row in _rows(chart)} == set(own.exchange_id.astype(str))
    with pytest.raises(KeyError, match="no exchanges of a connection"):
        tables.plot.sequence(1)


def test_wrong_arguments_are_refused_with_a_reason(tables):
    """The error lists the measures, or names the column."""
    with pytest.raises(ValueError, match="requests, bytes, errors"):
        tables.plot.timeline(measure="packets")
    with pytest.raises(KeyError, match="no column 'colour'"):
        tables.plot.latency("colour")
    with pytest.raises(KeyError, match="no column 'api_nam'; did you mean api_name"):
        tables.plot.latency("api_nam")
    for start in (-1, 10**6):
        with pytest.raises(ValueError, match=f"start must be from 0 to [0-9]+, not {start}"):
            tables.plot.sequence(start=start)


def test_names_from_a_capture_are_data_of_the_chart_only(tables):
    """A topic or client id never becomes a part of the specification, where Vega reads code."""
    chart = tables.plot.timeline("client_id").to_dict()
    names = {row["series"] for row in next(iter(chart.pop("datasets").values()))}
    assert names
    assert not any(name in str(chart) for name in names if len(name) > 3)
