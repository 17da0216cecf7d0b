"""Writes ``docs/reference.md``: every table and column, from the schemas and ``docs/columns.toml``.

python -m tools.table_reference [--check]
"""

from __future__ import annotations

import sys
import textwrap
import tomllib
from pathlib import Path

import pyarrow as pa

from kdissect.protocol import catalog
from kdissect.protocol.model import SIDES
from kdissect.tables.schemas import (
    COUNTERS,
    DECODE_VALUES,
    FIXED_TABLES,
    SIDE_COLUMNS,
    api_schema,
    decoded_fields,
    internal_schema,
)

DOCS = Path(__file__).parent.parent / "docs"
OUT = DOCS / "reference.md"


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


def rows(name: str, schema: pa.Schema, said: dict[str, str]) -> list[str]:
    """A table's lines. Raises SystemExit for a column without words, or words without a column."""
    by_side = (*COUNTERS, *(column for column, _ in SIDE_COLUMNS))
    sided = {f"{side}_{column}" for side in SIDES for column in by_side}
    lines = ["| column | type | |", "|---|---|---|"]
    used = {"_"}
    for field in schema:
        key = field.name
        if name == "connections" and key in sided and key not in said:
            key = key.split("_", 1)[1]
        if key not in said:
            raise SystemExit(f"docs/columns.toml has no text for {name}.{key}")
        used.add(key)
        lines.append(f"| `{field.name}` | {type_name(field.type)} | {said[key]} |")
    if extra := set(said) - used:
        raise SystemExit(f"docs/columns.toml: {name} has no column {min(extra)}")
    return lines


def reference() -> str:
    columns = tomllib.loads((DOCS / "columns.toml").read_text("utf-8"))
    if set(columns) != set(FIXED_TABLES):
        raise SystemExit("docs/columns.toml does not have the tables of the schemas")
    lines = [
        "# Columns",
        "",
        "Every column of every table. [tables.md](tables.md) explains the values.",
        "This page is made by `python -m tools.table_reference` from the schemas of the tables.",
        "",
    ]
    for name, schema in FIXED_TABLES.items():
        lines += [f"## {name}", "", columns[name]["_"], "", *rows(name, schema, columns[name]), ""]
    nested = pa.struct([])
    api = [field.name for field in api_schema(nested, nested)]
    internal = [field.name for field in internal_schema(nested, nested)]
    decoded = [field.name for kind in DECODE_VALUES for field in decoded_fields(kind)]
    names = sorted(each.name for each in catalog.apis().values())
    lines += [
        "## apis/&lt;ApiName&gt;",
        "",
        f"Columns {', '.join(f'`{name}`' for name in api)}.",
        "",
        "`request` and `response` are structs with the fields of all versions "
        "(`kdissect definitions NAME` lists them). A field is null if the version lacks it. A "
        "table exists if the captures have an exchange of its API. The names, with SaslToken for "
        "raw SASL tokens:",
        "",
        "```",
        *textwrap.wrap(" ".join([*names, "SaslToken"]), 100),
        "```",
        "",
        "## internal/&lt;Name&gt;",
        "",
        f"Columns {', '.join(f'`{name}`' for name in internal)}; records of the metadata log have "
        "no `key`. A table exists if the captures have such a record.",
        "",
        "## Columns on request",
        "",
        f"`--decode-values` adds to `records`: {', '.join(f'`{name}`' for name in decoded)}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    text = reference()
    if "--check" in sys.argv[1:]:
        if OUT.read_text("utf-8") != text:
            raise SystemExit("docs/reference.md is not what the schemas say: make it again")
    else:
        OUT.write_text(text, "utf-8")
