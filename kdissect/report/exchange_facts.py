"""`x`, the exchanges that all sections of the report read, and quantiles of them."""

from __future__ import annotations

from kdissect.report.database import ReportDatabase
from kdissect.sql.requests import make_requests

EXACT_MAX = 20_000_000  # above this many exchanges percentiles are t-digests: bounded memory


def prepare(database: ReportDatabase) -> None:
    """Make the base tables of `sql.requests`, and `x`."""
    make_requests(database)
    database.run("CREATE TEMP VIEW x AS FROM requests")


def quantile(database: ReportDatabase, column: str, share: float, condition: str = "true") -> str:
    """SQL of a quantile, exact unless that takes much memory."""
    exact = database.value("SELECT count(*) <= ? FROM exchanges", [EXACT_MAX])
    name = "quantile_cont" if exact else "approx_quantile"
    return f"{name}({column}, {share}) FILTER ({condition})"


def quantiles(database: ReportDatabase, column: str, condition: str = "true") -> str:
    """SQL of p50, p90, p95, p99 and max of a column."""
    shares = (0.5, 0.9, 0.95, 0.99)
    found = [
        f"{quantile(database, column, share, condition)} AS p{share * 100:.0f}" for share in shares
    ]
    return ", ".join([*found, f"max({column}) FILTER ({condition}) AS max"])
