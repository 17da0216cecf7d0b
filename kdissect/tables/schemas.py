"""Arrow schemas of all tables, made from their declaration in `columns.toml`.

Each field carries its column's meaning and unit as metadata, which travel with the rows into
Parquet. Parquet files have plain types (no dictionaries), so any reader can open them without
settings.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import pyarrow as pa

from kdissect.arrays import Bools, Ints
from kdissect.codec.arrow_columns import UNKNOWN_TAGS
from kdissect.protocol.model import SIDES
from kdissect.tables.arrow_arrays import TIME_TYPE, numbers, times_from_ns, times_of

FORMAT_VERSION = 1

_GROUP, _TOPIC = pa.field("group_id", pa.string()), pa.field("topic", pa.string())
_PARTITION, _OFFSET = pa.field("partition", pa.int32()), pa.field("offset", pa.int64())
_TYPES: dict[str, pa.DataType] = {
    **{str(one): one for one in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.bool_())},
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "time": TIME_TYPE,
    "list<string>": pa.list_(pa.string()),
    "list<int16>": pa.list_(pa.int16()),
    "list<int64>": pa.list_(pa.int64()),
    "map<string, int64>": pa.map_(pa.string(), pa.int64()),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    "topic partitions": pa.list_(pa.struct([_TOPIC, _PARTITION])),
    "group offsets": pa.list_(pa.struct([_GROUP, _TOPIC, _PARTITION, _OFFSET])),
    "evidence": pa.struct(
        [(f"{of}_ids", pa.list_(pa.int64())) for of in ("exchange", "connection")]
    ),
    "unknown tags": UNKNOWN_TAGS,
    "body": pa.null(),  # differs between APIs, and between records
}
_SENDERS = dict(zip(SIDES, ("client", "broker"), strict=True))


def _columns(declared: Mapping[str, Any]) -> dict[str, list[str]]:
    """The columns of a table in order; those of a connection's sides once for each side."""
    columns = {name: words for name, words in declared.items() if name != "_"}
    sided = {name: columns.pop(name) for name in list(columns) if "{" in name}
    for side, sender in _SENDERS.items():
        for name, (*kind, meaning) in sided.items():
            columns[name.format(side=side)] = [*kind, meaning.format(sender=sender)]
    return columns


def _field(name: str, words: list[str]) -> pa.Field:
    kind, *unit, meaning = words
    metadata = {"meaning": meaning, "unit": "".join(unit)}
    return pa.field(name, _TYPES[kind], metadata=metadata)


def _schema(declared: Mapping[str, Any]) -> pa.Schema:
    fields = [_field(name, words) for name, words in _columns(declared).items()]
    return pa.schema(fields, {"meaning": declared["_"]} if "_" in declared else None)


_DECLARED = tomllib.loads(files(__package__).joinpath("columns.toml").read_text("utf-8"))
_DECODED = {kind: _schema(declared) for kind, declared in _DECLARED.pop("decode_values").items()}
DERIVED_TABLES = {name: _schema(declared) for name, declared in _DECLARED.pop("derived").items()}
INCIDENTS, INVENTORY = DERIVED_TABLES["incidents"], DERIVED_TABLES["inventory"]
API_COLUMNS, INTERNAL_COLUMNS, SINCE_COLUMNS = (
    _schema(_DECLARED.pop(name)) for name in ("apis", "internal", "since")
)

# In the order of `names` and the summary. These tables exist even if they are empty.
FIXED_TABLES = {name: _schema(declared) for name, declared in _DECLARED.items()}
COUNTED_TABLES = tuple(name for name in FIXED_TABLES if name != "captures")  # in `totals`
CONNECTIONS, EXCHANGES = FIXED_TABLES["connections"], FIXED_TABLES["exchanges"]
RECORD_BATCHES, RECORDS = FIXED_TABLES["record_batches"], FIXED_TABLES["records"]
GROUP_EVENTS, TRANSACTIONS = FIXED_TABLES["group_events"], FIXED_TABLES["transactions"]
FETCH_SESSIONS, ANOMALIES = FIXED_TABLES["fetch_sessions"], FIXED_TABLES["anomalies"]
CAPTURES, TOPICS, BROKERS = (FIXED_TABLES[name] for name in ("captures", "topics", "brokers"))


def meaning_of(field: pa.Field) -> str:
    """The meaning of a column: a clause without a full stop; "" for a column without one."""
    return (field.metadata or {}).get(b"meaning", b"").decode()


def _with_bodies(columns: pa.Schema, bodies: Mapping[str, pa.DataType | None]) -> pa.Schema:
    """The columns with the types of their bodies; without those whose type is None."""
    return pa.schema(
        [
            column.with_type(bodies[column.name]) if column.name in bodies else column
            for column in columns
            if bodies.get(column.name, column.type) is not None
        ]
    )


def api_schema(request: pa.DataType, response: pa.DataType) -> pa.Schema:
    """Schema of ``apis/<ApiName>`` from the struct types of both sides' bodies."""
    return _with_bodies(API_COLUMNS, {"request": request, "response": response})


def internal_schema(key: pa.DataType | None, value: pa.DataType) -> pa.Schema:
    """Schema of ``internal/<Name>``; records of the metadata log have no key."""
    return _with_bodies(INTERNAL_COLUMNS, {"key": key, "value": value})


def decoded_fields(kind: str) -> list[pa.Field]:
    """Columns that a value of ``--decode-values`` adds to `records`."""
    return list(_DECODED[kind])


def fixed_tables(decode_values: str | None = None) -> dict[str, pa.Schema]:
    """`FIXED_TABLES` for a run with that option."""
    if decode_values is None:
        return FIXED_TABLES
    fields = [*RECORDS, *decoded_fields(decode_values)]
    return {**FIXED_TABLES, "records": pa.schema(fields, RECORDS.metadata)}


Row = dict[str, Any]  # the values of a row, or of a part of a JSON document, by name
# A column: an Arrow array, a list, or a NumPy array, alone or with a bool array of the values that
# are not null.
Column: TypeAlias = "pa.Array | pa.ChunkedArray | list[Any] | Ints | tuple[Ints, Bools]"


def table_of(schema: pa.Schema, columns: Mapping[str, Column]) -> pa.Table:
    """The table with these columns, given in any order.

    Times in NumPy arrays are nanoseconds since 1970. A dictionary of strings stays one.
    """
    assert columns.keys() == set(schema.names), columns.keys() ^ set(schema.names)
    arrays = [_array(columns[field.name], field.type) for field in schema]
    fields = [field.with_type(array.type) for field, array in zip(schema, arrays, strict=True)]
    return pa.table(arrays, schema=pa.schema(fields, schema.metadata))


def _array(column: Column, kind: pa.DataType) -> pa.Array:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    if isinstance(column, list):
        return pa.array(column, kind)
    values, valid = column if isinstance(column, tuple) else (column, None)
    if kind == TIME_TYPE:
        return times_from_ns(values, valid)
    return numbers(values, kind, valid)


def table_of_rows(schema: pa.Schema, rows: Iterable[Any]) -> pa.Table:
    """The table of rows: dicts by column, or objects with the columns as attributes.

    Times are nanoseconds since 1970, or None. Other attributes are left out.
    """
    listed = list(rows)
    columns = {}
    for field in schema:
        of_row = (
            itemgetter(field.name)
            if listed and isinstance(listed[0], dict)
            else attrgetter(field.name)
        )
        values = list(map(of_row, listed))
        columns[field.name] = (
            times_of(values) if field.type == TIME_TYPE else pa.array(values, field.type)
        )
    return pa.table(columns, schema=schema)
