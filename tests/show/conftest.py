"""What the tests of `show` share."""

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from kdissect.pipeline.options import Options
from kdissect.pipeline.selection import Selection
from kdissect.show.listing import Exchanges
from kdissect.show.loop import Style, show
from tests.conftest import CAPTURES
from tests.material import ABSENT
from tests.material import CAPTURES as SHARED

SHIPPED = sorted(path for path in CAPTURES.iterdir() if ".pcap" in path.name)


def shared(*names: str, quickly: Collection[str] = ()) -> list[Any]:
    """Captures that lie beside the project, as cases: skipped where they are not, heavy but for
    some."""
    return [
        pytest.param(
            path := SHARED / name,
            marks=[
                pytest.mark.skipif(not path.exists(), reason=ABSENT),
                *([] if path.name in quickly else [pytest.mark.heavy]),
            ],
        )
        for name in names
    ]


def key_log(path: Path) -> tuple[str, ...]:
    found = path.with_name(f"{path.name.split('.')[0]}.keylog")
    return (os.fspath(found),) if found.exists() else ()


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
