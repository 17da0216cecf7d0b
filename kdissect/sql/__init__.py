"""SQL over a table set with DuckDB: every table is a view, and queries can only read them."""

from kdissect.sql.database import MEMORY_LIMIT, Database, view_name

__all__ = ["MEMORY_LIMIT", "Database", "view_name"]
