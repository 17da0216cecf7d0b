"""Text of a capture, made safe to look at: whoever sent it chose every character."""

from __future__ import annotations

SHOWN_MAX = 300


def visible(value: str | None, limit: int = SHOWN_MAX) -> str:
    """The text with characters that hide or reorder others written out, and cut (saying so).

    Control characters, line ends and marks of writing direction become ``\\u202e``; escaping for
    HTML is the template's.
    """
    if value is None:
        return ""
    cut = value[:limit]
    safe = "".join(c if c.isprintable() else _written_out(c) for c in cut)
    if len(value) > limit:
        safe += f"… ({len(value):,} characters)"
    return safe


def _written_out(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
