"""Rows of `internal/<Name>`: decoded records of Kafka's internal topics, and control records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Bools, Indices
from kdissect.codec.internal_records import (
    CONTROL,
    LOG_OF_TOPIC,
    METADATA,
    InternalColumns,
    InternalFaults,
    decode_internal,
)
from kdissect.codec.redaction import (
    TEXT,
    hide_tags,
    record_may_hold_secrets,
    redact_column,
    secret_rows,
)
from kdissect.kafka.assembly import Anomaly
from kdissect.protocol import catalog
from kdissect.status import Status
from kdissect.tables.embedded import group_members
from kdissect.tables.payload import FULL, KEYS
from kdissect.tables.schemas import Column, internal_schema, table_of

_PLACE = [
    *("exchange_id", "batch_index", "record_index"),
    *("topic", "partition", "offset", "timestamp"),
]
_COLUMNS = [*_PLACE, "key", "value"]
MEMBERS = "members_decoded"  # of GroupMetadata only

_KINDS = {
    Status.UNKNOWN_API: Anomaly.UNKNOWN_VERSION,
    Status.UNKNOWN_VERSION: Anomaly.UNKNOWN_VERSION,
    Status.SIZE_MISMATCH: Anomaly.SURPLUS_BYTES,
    Status.INVALID_UTF8: Anomaly.INVALID_UTF8,
    Status.LIMIT: Anomaly.LIMIT,
}


@dataclass(frozen=True, slots=True)
class RecordFault:
    """One kind of fault in records of a batch: row and bytes of the first such record."""

    kind: Anomaly
    row: int
    detail: str
    data: bytes
    is_secret: bool


def internal_rows(
    records: pa.Table, payload: str, reveal_secrets: bool, sink: Callable[[str, pa.Table], None]
) -> tuple[pa.Table, list[RecordFault]]:
    """Decode the internal records among `records` (rows of that table, whole keys and values) to
    rows of ``internal/`` for the sink.

    Returns (the records, with [redacted] for values that contain a secret; faults). Without
    internal records it only costs a check of topic names.
    """
    topic = records["topic"].combine_chunks()
    names = topic.dictionary.to_pylist()
    internal = [(code, name) for code, name in enumerate(names) if name in LOG_OF_TOPIC]
    control = records["control_type"]
    faults: list[RecordFault] = []
    if not internal and control.null_count == len(control):
        return records, faults
    is_control = control.is_valid().to_numpy()
    codes = topic.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    chosen = [
        (LOG_OF_TOPIC[name], np.flatnonzero((codes == code) & ~is_control))
        for code, name in internal
    ]
    is_secret = np.zeros(records.num_rows, np.bool_)
    for log, rows in [*chosen, (CONTROL, np.flatnonzero(is_control))]:
        some = records.select(_COLUMNS).take(pa.array(rows))
        keys, values = some["key"].combine_chunks(), some["value"].combine_chunks()
        decoded, found = decode_internal(log, keys, values) if len(rows) else ([], [])
        for columns in decoded:
            value, tags = columns.value, columns.value_unknown_tags
            if not reveal_secrets and record_may_hold_secrets(columns.name):
                is_secret[rows[columns.rows[secret_rows(value)]]] = True
                value, tags = redact_column(value), hide_tags(tags)
            if len(columns.rows):
                sink(f"internal/{columns.name}", _table(some, columns, value, tags, payload))
        for fault in found:
            # nobody knows what an unknown record of the metadata log holds
            is_unknown = log == METADATA and fault.what not in catalog.record_definitions()
            may_show = reveal_secrets or not (is_unknown or record_may_hold_secrets(fault.what))
            is_secret[rows[fault.rows]] |= not may_show
            data = keys if fault.in_key else values
            faults += _batch_faults(some, data, fault, rows, not may_show)
    return _without_secrets(records, is_secret), faults


def _table(
    some: pa.Table, columns: InternalColumns, value: pa.Array, tags: pa.Array, payload: str
) -> pa.Table:
    count = len(columns.rows)
    members = group_members(value) if columns.name == "GroupMetadata" else None
    if payload != FULL:
        if members is not None:
            members = pa.nulls(count, members.type)
        value, tags = pa.nulls(count, value.type), pa.nulls(count, tags.type)
    place = some.select(_PLACE).take(pa.array(columns.rows))
    data: dict[str, Column] = {name: place[name] for name in _PLACE}
    data["topic"] = place["topic"].cast(pa.string())
    data["value_version"] = (columns.value_version, columns.has_value)
    data["value"] = value
    data["value_unknown_tags"] = tags
    key, key_version = columns.key, columns.key_version
    data["key_version"] = pa.nulls(count, pa.int16()) if key_version is None else key_version
    if key is not None:
        data["key"] = key if payload in (FULL, KEYS) else pa.nulls(count, key.type)
    schema = internal_schema(None if key is None else key.type, value.type)
    if members is not None:
        data[MEMBERS] = members
        schema = schema.append(pa.field(MEMBERS, members.type))
    return table_of(schema, data)


def _batch_faults(
    some: pa.Table, data: pa.Array, fault: InternalFaults, rows: Indices, is_secret: bool
) -> list[RecordFault]:
    """One row per batch with that fault, showing the first of its records."""
    via = pa.array(fault.rows)
    pair = np.zeros(len(fault.rows), [("exchange", "<i8"), ("batch", "<i8")])
    pair["exchange"] = some["exchange_id"].take(via).to_numpy()
    pair["batch"] = some["batch_index"].take(via).to_numpy()
    batches, first, counts = np.unique(pair, return_index=True, return_counts=True)
    kind = _KINDS.get(fault.status, Anomaly.MALFORMED_RECORDS)
    listed = []
    for batch, at, count in zip(batches["batch"], first.tolist(), counts.tolist(), strict=True):
        row = int(fault.rows[at])
        index = some["record_index"][row].as_py()
        more = f" (so are {count - 1} more of it)" if count > 1 else ""
        detail = f"record batch {batch}, record {index}: {fault.detail(at)}{more}"
        listed.append(
            RecordFault(kind, int(rows[row]), detail, data[row].as_py() or b"", is_secret)
        )
    return listed


def _without_secrets(records: pa.Table, is_secret: Bools) -> pa.Table:
    if not is_secret.any():
        return records
    values = records["value"]
    shown = pc.if_else(pc.and_(pa.array(is_secret), values.is_valid()), TEXT.encode(), values)
    index = records.schema.get_field_index("value")
    return records.set_column(index, records.schema.field(index), shown)
