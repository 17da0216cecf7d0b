"""The inventory of clients: its file, and its changes as lines for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from kdissect.cli.options import InventoryOptions


def write_inventory(table: pa.Table, options: InventoryOptions) -> Iterator[str]:
    """Write the file of --inventory; yield lines about the file and the changes since a time."""
    from kdissect.text import plural

    if options.since is not None:
        yield from _changes(table.to_pylist(), options.since)
    if options.inventory is not None:
        from kdissect.sql.csv_files import write_csv_file

        write_csv_file(table, options.inventory)
        yield f"Inventory: {options.inventory} ({plural(table.num_rows, 'client')})"


def _changes(rows: list[dict[str, Any]], since: str) -> Iterator[str]:
    from kdissect.sql.inventory import CHANGES, SAME
    from kdissect.text import visible

    clients = [row for row in rows if row["role"] == "client"]
    counts = Counter(row["change"] for row in clients)
    yield f"Clients since {since}: {', '.join(f'{counts[name]:,} {name}' for name in CHANGES)}"
    for change in CHANGES:
        for row in clients:
            if row["change"] == change != SAME:
                name = visible(row["client_id"]) or "(no client id)"
                software = visible(", ".join(row["software"] or []))
                yield f"{change:<8} {row['client_ip']}  {name}  {software}".rstrip()
                for text in row["changes"] or []:
                    yield f"         {visible(text)}"
