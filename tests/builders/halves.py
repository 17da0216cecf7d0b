"""Table sets with a part of the exchanges of another one."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from kdissect import Tables
from kdissect.api import Table


def halves(tables: Tables, seed: int) -> tuple[Tables, Tables]:
    """The connections of a table set dealt out to two sides of equal number."""
    exchanges = tables.exchanges.to_arrow(columns=["connection_id", "exchange_id"])
    connections = np.unique(exchanges["connection_id"].to_numpy())
    np.random.default_rng(seed).shuffle(connections)
    is_a = np.isin(exchanges["connection_id"].to_numpy(), connections[: len(connections) // 2])
    return with_exchanges(tables, exchanges.filter(is_a)), with_exchanges(
        tables, exchanges.filter(~is_a)
    )


def with_exchanges(tables: Tables, exchanges: pa.Table) -> Tables:
    """The tables with the rows of some exchanges; anomalies are those of their connections."""
    made = {}
    for name in tables.names:
        columns = tables[name].schema.names
        key = "exchange_id" if "exchange_id" in columns and name != "anomalies" else "connection_id"
        made[name] = tables[name]
        if key in columns:
            chosen = pc.field(key).isin(pc.unique(exchanges[key]))
            made[name] = Table(name, pads.dataset(tables[name].dataset.to_table(filter=chosen)))
    return Tables(made, tables.manifest)
