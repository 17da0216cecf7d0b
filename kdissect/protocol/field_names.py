"""Kafka's names in ours."""

from __future__ import annotations

import re

_SNAKE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def snake_case(name: str) -> str:
    """Kafka's field name in ours: ``ThrottleTimeMs`` is ``throttle_time_ms``."""
    return _SNAKE.sub("_", name).lower()
