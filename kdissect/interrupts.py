"""SIGINT while another library runs, as Python's KeyboardInterrupt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts() -> Iterator[None]:
    """Turn SIGINT during a query into KeyboardInterrupt; DuckDB raises an error of its own for
    it."""
    try:
        yield
    except Exception as error:
        import duckdb  # imported already if there was a query; loading it takes long otherwise

        is_cut = isinstance(error, RuntimeError) and "Query interrupted" in str(error)
        if is_cut or isinstance(error, duckdb.InterruptException):
            raise KeyboardInterrupt from error
        raise


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether SIGINT caused an error: a library may fail in many ways when interrupted."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
