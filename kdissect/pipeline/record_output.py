"""What is done with every record that was decoded, wherever: internal tables, secrets, payload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.codec.record_batches import FaultStage
from kdissect.kafka.assembly import Anomaly
from kdissect.pipeline.options import Options
from kdissect.status import REASONS, Status
from kdissect.tables.internal import RecordFault, internal_rows, without_secrets
from kdissect.tables.payload import shown, with_decoded

_FAULTS: dict[tuple[FaultStage, Status], Anomaly] = {
    (FaultStage.FRAMING, Status.UNKNOWN_MAGIC): Anomaly.UNKNOWN_MAGIC,
    (FaultStage.CRC, Status.BAD_CRC): Anomaly.WRONG_CRC,
    (FaultStage.CODEC, Status.UNKNOWN_CODEC): Anomaly.DECOMPRESSION_FAILED,
    (FaultStage.CODEC, Status.CORRUPT): Anomaly.DECOMPRESSION_FAILED,
    (FaultStage.CODEC, Status.LIMIT): Anomaly.DECOMPRESSION_LIMIT,
    (FaultStage.RECORDS, Status.BAD_CRC): Anomaly.WRONG_CRC,
    (FaultStage.RECORDS, Status.COUNT_MISMATCH): Anomaly.RECORD_COUNT_MISMATCH,
    (FaultStage.RECORDS, Status.LIMIT): Anomaly.LIMIT,
}


def as_shown(
    records: pa.Table, options: Options, sink: Callable[[str, pa.Table], None]
) -> tuple[pa.Table, list[RecordFault]]:
    """Rows of `records` as the options show them; what is internal goes to tables of its own."""
    faults: list[RecordFault] = []
    internal = internal_rows(records, options.payload, options.reveal_secrets)
    if internal is not None:
        for name, table in internal.tables:
            sink(f"internal/{name}", table)
        faults = internal.faults
        records = without_secrets(records, internal.secret)
    records = shown(records, options.payload)
    if options.decode_values is not None:
        records = with_decoded(records, options.decode_values, options.payload)
    return records, faults


def alike(
    faults: npt.NDArray[np.void], parts: npt.NDArray[Any]
) -> Iterator[tuple[npt.NDArray[np.void], int, Anomaly, str]]:
    """FAULT rows that say the same: (these, their part, what they are, why).

    parts: a small number per row that keeps rows apart. The reason may name {number}, which is `a`.
    """
    told = (faults["stage"].astype(np.int64) << 16) | (faults["kind"].astype(np.int64) << 8) | parts
    for code in np.unique(told).tolist():
        stage, status = FaultStage(code >> 16), Status((code >> 8) & 255)
        kind, reason = _FAULTS.get((stage, status)), REASONS[status]
        if stage is FaultStage.TEXT:
            kind, reason = Anomaly.INVALID_UTF8, "{number} header keys are no UTF-8"
        chosen = faults[told == code]
        yield chosen, code & 255, Anomaly.MALFORMED_RECORDS if kind is None else kind, reason
