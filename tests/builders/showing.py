"""What `show` writes, as lines."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdissect.pipeline.options import Options
from kdissect.pipeline.selection import Selection
from kdissect.show.listing import Exchanges
from kdissect.show.loop import Style, show


def shown(
    paths: Path | Sequence[Path],
    style: Style | None = None,
    selection: Selection | None = None,
    **options: Any,
) -> list[str]:
    """The lines that `show` writes."""
    out: list[bytes] = []
    named = [os.fspath(path) for path in ([paths] if isinstance(paths, Path) else paths)]
    style, made = style or Style(), Options(**options)
    exchanges = Exchanges(named, made, selection or Selection(), str, style.detail)
    show(exchanges, made, style, out.append)
    return b"".join(out).decode().splitlines()


def raw_text(lines: list[str]) -> str:
    """The bytes that stand beside fields, one after the other, as text."""
    rows = (re.match(r"  [0-9a-f]{6}  ((?:[0-9a-f]{2} )+)", line) for line in lines)
    return b"".join(bytes.fromhex(row[1]) for row in rows if row).decode("latin-1")
