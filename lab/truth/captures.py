"""Captures with logs."""

from pathlib import Path

import kdissect
from kdissect import Tables


def log_of(capture: Path) -> Path:
    """Return the path of a capture's request log, which may not exist."""
    return capture.with_suffix(".requests.jsonl.gz")


def read_capture(capture: Path, original: Path | None = None) -> Tables:
    """The tables of a capture, decrypted if a key log lies beside it, or beside its original."""
    key_log = (original or capture).with_suffix(".keylog")
    return kdissect.read(capture, keylog=key_log if key_log.is_file() else ())
