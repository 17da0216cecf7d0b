"""The inventory of clients: its file, and its changes as lines for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from kdissect.cli.options import InventoryOptions

if TYPE_CHECKING:
    import pyarrow as pa


def write_inventory(table: pa.Table, options: InventoryOptions) -> Iterator[str]:
    """Write the file of --inventory; yield lines about the file and the changes since a time."""
    from kdissect.text import plural

    if options.since is not None:
        yield from _changes(table.to_pylist(), options.since)
    if options.inventory is not None:
        from kdissect.sql.csv_files import write_csv_file

        write_csv_file(table, options.inventory)
        brokers = table["role"].to_pylist().count("broker")
        also = f" and {plural(brokers, 'broker')}" if brokers else ""
        yield f"Inventory: {options.inventory} ({plural(len(table) - brokers, 'client')}{also})"


def _changes(rows: list[dict[str, Any]], since: str) -> Iterator[str]:
    from kdissect.sql.inventory import CLIENT_CHANGES, SAME
    from kdissect.text import visible

    clients = [row for row in rows if row["role"] == "client"]
    counts = Counter(row["change"] for row in clients)
    yield f"Clients since {since}: " + ", ".join(f"{counts[c]:,} {c}" for c in CLIENT_CHANGES)
    for change in CLIENT_CHANGES:
        for row in clients:
            if row["change"] == change != SAME:
                name = visible(row["client_id"]) or "(no client id)"
                software = visible(", ".join(row["software"] or []))
                yield f"{change:<8} {row['client_ip']}  {name}  {software}".rstrip()
                texts = (text.partition(" ") for text in row["changes"] or [])
                for column, values in groupby(texts, key=itemgetter(0)):
                    shown = ", ".join(visible(value) for _, _, value in values)
                    yield f"         {column}: {shown}"
