"""The inventory of clients: its options, its file, and its changes as lines for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kdissect.cli.verbs import OptionGroup

if TYPE_CHECKING:
    from kdissect.api import Tables
    from kdissect.tables.schemas import Row


@dataclass(frozen=True)
class InventoryOptions(OptionGroup):
    """Options for the inventory of clients."""

    TITLE = "Inventory of clients"

    inventory: str | None = None
    since: str | None = None

    @property
    def is_given(self) -> bool:
        """Return whether the user wants the inventory."""
        return self.inventory is not None or self.since is not None

    @property
    def since_us(self) -> int | None:
        """Return the time in microseconds since 1970."""
        from kdissect.pipeline.filters import time_ns

        return None if self.since is None else time_ns(self.since) // 1000

    def check(self) -> None:
        """Raise BadParameter for a file that cannot be written."""
        if self.inventory is not None:
            path = Path(self.inventory)
            if path.is_dir() or not path.absolute().parent.is_dir():
                raise typer.BadParameter(
                    f"{path}: is a folder, or in none", param_hint="--inventory"
                )


def write_inventory(tables: Tables, options: InventoryOptions) -> Iterator[str]:
    """Write the file of --inventory; yield lines about the file and the changes since a time."""
    from kdissect.sql.formats import write_csv_file
    from kdissect.text import plural

    inventory = tables.inventory(options.since).to_arrow()
    if options.since is not None:
        yield from _changes(inventory.to_pylist(), options.since)
    if options.inventory is not None:
        write_csv_file(inventory, options.inventory)
        brokers = inventory["role"].to_pylist().count("broker")
        also = f" and {plural(brokers, 'broker')}" if brokers else ""
        yield f"Inventory: {options.inventory} ({plural(len(inventory) - brokers, 'client')}{also})"


def _changes(rows: list[Row], since: str) -> Iterator[str]:
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
