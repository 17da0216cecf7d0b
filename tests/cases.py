"""Tests with parameters, of which the repeated ones run under `make test-all` only."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(
    names: str | tuple[str, ...], quick: Iterable[Any], *, heavy: Collection[Any] = (), **how: Any
) -> pytest.MarkDecorator:
    """As `pytest.mark.parametrize`: a test for each value. Those of `heavy` are marked so."""
    quick = list(quick)
    values = [*quick, *(value for value in heavy if value not in quick)]
    marked = [
        pytest.param(
            *([value] if isinstance(names, str) else value),
            marks=[pytest.mark.heavy] if value in heavy else [],
        )
        for value in values
    ]
    return pytest.mark.parametrize(names, marked, **how)
