"""``--append``: a table set and the next captures become one set, as one run over all makes it.

Connections cross files, and so do the stories of groups and names of topics. So the captures of
the set are read again together with the new ones, and the new set takes the old one's place once
it is whole. They must still be where they were; the cost is that of one run over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kdissect.capture.remote import is_remote
from kdissect.errors import CaptureError, OutputError
from kdissect.pipeline.commit import has_set, read_manifest
from kdissect.pipeline.options import Options

# Options that say what is in the rows; the others say how the work is done, or only add certainty.
_SAME = ("reveal_secrets", "payload", "decode_values", "hosts", "time_from_ns", "time_to_ns",
         "limits")  # fmt: skip


def extended(out: str, paths: Sequence[str], options: Options) -> tuple[list[str], Options]:
    """(the captures of the set at `out` and the new ones, options of both).

    Where there is no set yet, the new ones alone. Raises CaptureError for a capture of the set that
    is gone or was cut, OutputError where the set was made with other options.
    """
    if not has_set(out):
        return list(paths), options
    manifest = read_manifest(out)
    before, now = manifest["options"], options.to_json()
    for name in _SAME:
        if before.get(name, now[name]) != now[name]:
            raise OutputError(
                f"{out}: was made with {name} = {before[name]!r}, not {now[name]!r}; "
                "--append needs the same"
            )
    kept = [str(item["path"]) for item in manifest["inputs"] if _is_there(out, item)]
    ports = dict.fromkeys([*before.get("ports", ()), *options.ports])
    keylog = dict.fromkeys([*before.get("keylog", ()), *options.keylog])
    return (
        [*kept, *(path for path in paths if path not in kept)],
        replace(options, ports=tuple(ports), keylog=tuple(keylog)),
    )


def _is_there(out: str, item: dict[str, Any]) -> bool:
    """True for a capture that can be read again; False for what was no capture the first time."""
    if not item.get("is_capture", True):
        return False
    if is_remote(item["path"]):
        return True  # looked at when it is read
    path = Path(item["path"])
    if not path.is_file():
        raise CaptureError(f"{path}: the tables in {out} were made from it, and it is gone")
    if path.stat().st_size < item["size"]:
        raise CaptureError(
            f"{path}: the tables in {out} were made from it when it had {item['size']} bytes; "
            f"it has {path.stat().st_size} now"
        )
    return True
