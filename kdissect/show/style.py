"""What every line for people has in common: colours, safe text, widths and phrases. No imports."""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
RESET, BOLD, DIM = "\x1b[0m", "\x1b[1m", "\x1b[2m"
RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN = (f"\x1b[3{n}m" for n in range(1, 7))

TOPICS_SHOWN = 3  # names of a line; how many more there are is said
CLIENT_WIDTH, API_WIDTH, ADDRESS_WIDTH, SIZE_WIDTH, LATENCY_WIDTH = 16, 24, 21, 7, 13
ARROW = " → "
NO_ANSWER_WANTED = "no answer wanted"


def safe(text: str) -> str:
    """The text without characters that do something to a terminal or turn its direction."""
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    short = {9: "\\t", 10: "\\n", 13: "\\r"}.get(code)
    return short or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
