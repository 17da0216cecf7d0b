"""Writes ``docs/reference.md``: every table and column, from the schemas.

python -m tools.table_reference
"""

import textwrap
from pathlib import Path
from typing import get_args

import pyarrow as pa

from kdissect.pipeline.options import DecodeValues
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import SASL_TOKEN
from kdissect.tables.schemas import (
    API_COLUMNS,
    DERIVED_TABLES,
    FIXED_TABLES,
    INTERNAL_COLUMNS,
    SINCE_COLUMNS,
    decoded_fields,
    meaning_of,
)

OUT = Path(__file__).parent.parent / "docs" / "reference.md"


def type_name(kind: pa.DataType) -> str:
    """Arrow's type as the documents write it."""
    if pa.types.is_timestamp(kind):
        return f"timestamp[{kind.unit}, {kind.tz}]"
    if pa.types.is_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<{type_name(kind.key_type)}, {type_name(kind.item_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{field.name} {type_name(field.type)}' for field in kind)}>"
    return {"double": "float64"}.get(str(kind), str(kind))


def listed(schema: pa.Schema) -> list[str]:
    """The lines about a table: what a row is, and its columns."""
    return [schema.metadata[b"meaning"].decode(), "", *columns(schema)]


def unit_of(field: pa.Field) -> str:
    """The unit of a column: ``bytes``, ``ms``, ``ns``, or "" if it has none."""
    return str(field.metadata[b"unit"].decode())


def columns(schema: pa.Schema) -> list[str]:
    lines = ["| column | type | unit | |", "|---|---|---|---|"]
    for field in schema:
        kind = "struct" if pa.types.is_null(field.type) else type_name(field.type)
        lines.append(f"| `{field.name}` | {kind} | {unit_of(field)} | {meaning_of(field)} |")
    return [*lines, ""]


def reference() -> str:
    lines = [
        "# Columns",
        "",
        "Every column of every table. [tables.md](tables.md) explains the values.",
        "`python -m tools.table_reference` makes this page from `kdissect/tables/columns.toml`.",
        "The fields of an Arrow schema and of a Parquet file carry these meanings and units as "
        "metadata.",
        "",
    ]
    for name, schema in FIXED_TABLES.items():
        lines += [f"## {name}", "", *listed(schema)]
    names = sorted(each.name for each in catalog.apis().values())
    lines += [
        "## apis/&lt;ApiName&gt;",
        "",
        *listed(API_COLUMNS),
        "`request` and `response` are structs with the fields of all versions "
        "(`kdissect definitions NAME` lists them). A field is null if the version lacks it. A "
        "table exists if the captures have an exchange of its API. The names, with SaslToken for "
        "raw SASL tokens:",
        "",
        "```",
        *textwrap.wrap(" ".join([*names, SASL_TOKEN]), 100),
        "```",
        "",
        "## internal/&lt;Name&gt;",
        "",
        *listed(INTERNAL_COLUMNS),
        "Records of the metadata log have no `key`. A table exists if the captures have such a "
        "record.",
        "",
    ]
    for name, schema in DERIVED_TABLES.items():
        lines += [f"## {name}", "", *listed(schema)]
    lines += [
        "## Columns on request",
        "",
        "`--since` adds these to `inventory`:",
        "",
        *columns(SINCE_COLUMNS),
        "`--decode-values` adds these to `records`:",
        "",
        "| value | column | type | |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{kind}` | `{field.name}` | {type_name(field.type)} | {meaning_of(field)} |"
        for kind in get_args(DecodeValues)
        for field in decoded_fields(kind)
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    OUT.write_text(reference(), "utf-8")
