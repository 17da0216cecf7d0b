"""Colours, widths and phrases of all lines for people. Imports no heavy library."""

from __future__ import annotations

from typing import Literal

RESET, BOLD, DIM = "\x1b[0m", "\x1b[1m", "\x1b[2m"
RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN = (f"\x1b[3{n}m" for n in range(1, 7))

TOPICS_SHOWN = 3  # names of a line; how many more there are is said
ADDRESS_WIDTH, SIZE_WIDTH = 21, 7
QUEUED_MS = 1  # shorter waits for earlier requests are not shown
ARROW = " → "
NO_ANSWER_WANTED = "no answer wanted"


def painted(part: str, colour: str, wanted: bool) -> str:
    """Return the text in a colour, if colours are wanted."""
    return f"{colour}{part}{RESET}" if wanted and part else part


Clock = Literal["utc", "clock", "relative", "delta"]  # of --time
