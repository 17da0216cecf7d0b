"""Where the recorded material of the tests lies.

Kafka's vectors and some captures ship with the project. Many more captures and Kafka's own
definitions lie beside the checkout, in `../shared`. `KDISSECT_MATERIAL` names another
folder; `KDISSECT_MATERIAL=none` hides it, so that tests run as in a clone.
"""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("KDISSECT_MATERIAL") or ROOT.parent / "shared")
CAPTURES = SHARED / "captures"
DEFINITIONS = SHARED / "kafka" / "definitions"
VECTORS = ROOT / "tests" / "golden" / "vectors"  # messages that Kafka's own classes wrote

ABSENT = "no recorded material (../shared) beside the checkout"
needs_material = pytest.mark.skipif(
    not CAPTURES.is_dir() or not DEFINITIONS.is_dir(), reason=ABSENT
)


def key_log(path: Path) -> tuple[str, ...]:
    """The key log beside a capture, if there is one."""
    found = path.with_name(f"{path.name.partition('.')[0]}.keylog")
    return (str(found),) if found.exists() else ()


def needed(path: Path) -> Path:
    """The path; the test skips if nothing lies there."""
    if not path.exists():
        pytest.skip(ABSENT)
    return path
