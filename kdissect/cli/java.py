"""Finds the Java that Spark would use."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def java_program() -> str | None:
    """Return the path of `java`: JAVA_HOME's, else the one on PATH; None without one."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    return java if java and os.access(java, os.X_OK) else None


def java_version(java: str) -> str:
    """Return a Java's version from its file `release`, or from `java -version` without one."""
    release = Path(java).resolve().parent.parent / "release"
    if release.exists():
        text = release.read_text(errors="replace")
    else:
        text = subprocess.run(
            [java, "-version"], capture_output=True, text=True, check=False
        ).stderr
        text = text.replace('version "', 'JAVA_VERSION="')
    return text.partition('JAVA_VERSION="')[2].split('"')[0]
