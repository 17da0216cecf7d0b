"""Batches that were written twice are proven by offsets, on recorded captures."""

from pathlib import Path

import pyarrow as pa

import kdissect
from kdissect.protocol.error_codes import ErrorCode
from tests.builders.messages import Exchange, batch, exchange, write_capture
from tests.builders.tables import changed
from tests.cases import cases
from tests.conftest import CAPTURES


@cases("name", ["retries_duplicate"], heavy=["retries_duplicate_plain"])
def test_offsets_of_both_copies(name: str) -> None:
    """Ten records lie at offset 30; the copy has the offset that the broker gave the last one."""
    found = kdissect.read(CAPTURES / "incidents" / f"{name}.pcap.gz").incidents().to_pylist()[0]
    again = 50 if name == "retries_duplicate" else 40
    assert "wrote 10 records to orders-0 twice: at offset 30," in found["text"]
    assert f"again at offset {again} " in found["text"]
    assert found["start_time"] < found["end_time"]


def test_a_response_that_the_capture_may_lack() -> None:
    """Its producer may have received it, and sent the same content again on purpose."""
    tables = kdissect.read(CAPTURES / "incidents" / "retries_duplicate.pcap.gz")
    sent = tables.sql(
        "select connection_id from exchanges where api_name = 'Produce' "
        "and status in ('response_missing', 'connection_closed')"
    )
    gap = {"kind": "gap", "direction": "response", "pos": 0, "byte_count": 10**9}
    gaps = [row | gap for row in sent.to_pylist()]
    assert gaps
    lossy = changed(tables, "anomalies", lambda table: pa.Table.from_pylist(gaps, table.schema))
    assert "duplicate_records" not in lossy.incidents().to_arrow()["kind"].to_pylist()


def test_other_records_of_the_same_number(tmp_path: Path) -> None:
    """Only values show that a batch is a copy: hidden ones are equal to all others."""

    def produce(number: int, value: bytes, offset: int, error: int = 0) -> Exchange:
        given = {"index": 0, "records": batch([(None, value)])}
        answer = {"index": 0, "error_code": error, "base_offset": offset}
        return exchange(
            number, 0, 7,
            {"acks": -1, "topic_data": [{"name": "orders", "partition_data": [given]}]},
            {"responses": [{"name": "orders", "partition_responses": [answer]}]},
        )  # fmt: skip

    timed_out = produce(2, b"b", -1, ErrorCode.REQUEST_TIMED_OUT)
    all_of = [produce(1, b"a", 9), timed_out, produce(3, b"c", 11), produce(4, b"d", 12)]
    path = write_capture(tmp_path / "made.pcap", all_of)
    for payload in ("full", "keys", "none"):
        found = kdissect.read(path, payload=payload).incidents().to_pylist()
        assert "duplicate_records" not in {row["kind"] for row in found}
