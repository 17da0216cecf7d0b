"""SIGINT in the middle of what another library does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts() -> Iterator[None]:
    """SIGINT in the middle of a query as Python's own; DuckDB makes an error of its own of it."""
    try:
        yield
    except Exception as error:
        import duckdb  # it is there, if there is a query; loading it takes a while else

        is_cut = isinstance(error, RuntimeError) and "Query interrupted" in str(error)
        if is_cut or isinstance(error, duckdb.InterruptException):
            raise KeyboardInterrupt from error
        raise


def is_interrupt(error: BaseException | None) -> bool:
    """Whether SIGINT is behind an error: a library may fail as the interrupt leaves it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
