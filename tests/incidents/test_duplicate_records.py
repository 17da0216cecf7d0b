"""Batches that were written twice are proven by offsets, on recorded captures."""

import pyarrow as pa

import kdissect
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
