"""The rows of `anomalies`: a fault, its place, a clause of detail, and a bounded look at bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.stream.index import ERROR, INFO, WARNING, Anomaly
from kdissect.tables.schemas import ANOMALIES

DATA_MAX = 4096  # the default: bytes that `data` shows; byte_count tells how many there are
SEVERITIES = ("info", "warning", "error")
DIRECTIONS = ("request", "response", None)

SEVERITY: dict[Anomaly, int] = {
    Anomaly.CAPTURE_CUT: ERROR,
    Anomaly.PACKET_CUT: WARNING,
    Anomaly.GAP: WARNING,
    Anomaly.OVERLAP_CONFLICT: WARNING,
    Anomaly.UNFRAMED_BYTES: WARNING,
    Anomaly.PARTIAL_FRAME: WARNING,
    Anomaly.MALFORMED_MESSAGE: ERROR,
    Anomaly.MALFORMED_RECORDS: ERROR,
    Anomaly.MALFORMED_EMBEDDED: WARNING,
    Anomaly.UNKNOWN_API: WARNING,
    Anomaly.UNKNOWN_VERSION: WARNING,
    Anomaly.WRONG_CRC: ERROR,
    Anomaly.RECORD_COUNT_MISMATCH: ERROR,
    Anomaly.UNKNOWN_MAGIC: ERROR,
    Anomaly.DECOMPRESSION_FAILED: ERROR,
    Anomaly.DECOMPRESSION_LIMIT: ERROR,
    Anomaly.LIMIT: WARNING,
    Anomaly.RESPONSE_WITHOUT_REQUEST: INFO,
    Anomaly.DUPLICATE_RESPONSE: WARNING,
    Anomaly.OUT_OF_ORDER_RESPONSE: WARNING,
    Anomaly.SEQUENCE_GAP: WARNING,
    Anomaly.SEQUENCE_DUPLICATE: WARNING,
    Anomaly.INVALID_UTF8: WARNING,
    Anomaly.NEGATIVE_LATENCY: INFO,
    Anomaly.CLOCK_STEP: INFO,
    Anomaly.SURPLUS_BYTES: INFO,
    Anomaly.NOT_DECRYPTED: INFO,
    Anomaly.LOST_FRAGMENTS: WARNING,
}

# What a fault of a stream says; {a} and {b} are the numbers of its ANOMALY row.
STREAM_DETAILS: dict[Anomaly, str] = {
    Anomaly.GAP: "{n} bytes of the stream are not in the capture",
    Anomaly.OVERLAP_CONFLICT: "{n} retransmitted bytes differ from the first copy, which counts",
    Anomaly.UNFRAMED_BYTES: "{n} bytes without a known frame boundary",
    Anomaly.PARTIAL_FRAME: "a frame announced {a} bytes, of which {n} are missing",
    Anomaly.RESPONSE_WITHOUT_REQUEST: "correlation id {a} answers no request of the capture",
    Anomaly.DUPLICATE_RESPONSE: "correlation id {a} was answered before",
    Anomaly.OUT_OF_ORDER_RESPONSE: "correlation id {a} came behind the answer to {b}",
    Anomaly.NEGATIVE_LATENCY: "the response is {a} ns older than the end of its request",
    Anomaly.CLOCK_STEP: "packet times step back by {a} ns",
    Anomaly.LIMIT: "limit reached: {a} of at most {b}",
    Anomaly.PACKET_CUT: "the capture holds {a} of the {b} bytes of a segment",
}


# Why TLS stayed encrypted, by `a` of its ANOMALY row (stream.tls).
_NOT_DECRYPTED = (
    "the beginning of the TLS handshake is not in the capture",
    "no key log has the secret of this TLS connection",
    "the version or cipher suite of this TLS connection is not supported",
    "the key log's secret does not fit this TLS connection",
)


@dataclass(slots=True)
class AnomalyRow:
    """One anomaly, by value; None where a column does not apply."""

    kind: Anomaly
    detail: str
    connection_id: int | None = None
    exchange_id: int | None = None
    capture_id: int | None = None
    packet: int | None = None
    direction: int = 2
    pos: int | None = None
    byte_count: int | None = None
    data: bytes | None = None


def anomalies_table(rows: Iterable[AnomalyRow], data_max: int = DATA_MAX) -> pa.Table:
    """`anomalies` from rows; of their data `data_max` bytes."""
    listed = list(rows)
    return pa.table(
        {
            "kind": [row.kind.name.lower() for row in listed],
            "severity": [SEVERITIES[SEVERITY[row.kind]] for row in listed],
            "connection_id": [row.connection_id for row in listed],
            "exchange_id": [row.exchange_id for row in listed],
            "capture_id": [row.capture_id for row in listed],
            "packet": [row.packet for row in listed],
            "direction": [DIRECTIONS[row.direction] for row in listed],
            "pos": [row.pos for row in listed],
            "byte_count": [row.byte_count for row in listed],
            "detail": [row.detail for row in listed],
            "data": [None if row.data is None else row.data[:data_max] for row in listed],
        },
        schema=ANOMALIES,
    )


def stream_anomalies(
    anomalies: npt.NDArray[np.void],
    connection_ids: npt.NDArray[np.int64],
    capture_ids: list[int],
    data: list[bytes | None],
) -> list[AnomalyRow]:
    """Rows for the ANOMALY array of an assembly; data[i] shows the bytes of row i."""
    rows = []
    for row, shown in zip(anomalies, data, strict=True):
        kind = Anomaly(int(row["kind"]))
        text = STREAM_DETAILS.get(kind, kind.name.lower().replace("_", " "))
        if kind is Anomaly.NOT_DECRYPTED:
            text = _NOT_DECRYPTED[int(row["a"])]
        connection, source = int(row["connection"]), int(row["source"])
        rows.append(
            AnomalyRow(
                kind=kind,
                detail=text.format(a=int(row["a"]), b=int(row["b"]), n=int(row["byte_count"])),
                connection_id=int(connection_ids[connection]) if connection >= 0 else None,
                exchange_id=int(row["exchange_id"]) or None,
                capture_id=capture_ids[source] if source >= 0 else None,
                packet=int(row["packet"]) if row["packet"] >= 0 else None,
                direction=int(row["direction"]),
                pos=int(row["pos"]) if row["pos"] >= 0 else None,
                byte_count=int(row["byte_count"]),
                data=shown,
            )
        )
    return rows
