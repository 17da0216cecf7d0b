"""`--where`: a SQL expression over the columns of `exchanges`, by DuckDB on the Arrow rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.errors import Error
from kdissect.interrupts import interrupts


class WhereError(Error):
    """The expression cannot be read, or names a column that there is not."""


class Where:
    """An expression, applied to one batch of rows after the other.

    DuckDB sees the rows and nothing else: no file, no network, no setting.
    """

    def __init__(self, expression: str) -> None:
        import duckdb

        self._errors = duckdb.Error
        self._expression = expression
        self._connection: Any = duckdb.connect(
            ":memory:", config={"enable_external_access": "false", "threads": "1"}
        )
        self._connection.execute("SET TimeZone='UTC'")
        self._connection.execute("SET lock_configuration=true")

    def rows(self, table: pa.Table) -> npt.NDArray[np.int64]:
        """int64[n]: the rows for which the expression is true. Raises WhereError."""
        number = pa.array(np.arange(table.num_rows, dtype=np.int64))
        numbered = table.append_column("_row", number)
        try:
            with interrupts():
                relation = self._connection.from_arrow(numbered).filter(self._expression)
                found = relation.project("_row").fetchnumpy()["_row"]
        except self._errors as error:
            reason = str(error).splitlines()[0]
            raise WhereError(f"--where {self._expression}: {reason}") from None
        return np.sort(np.asarray(found, np.int64))
