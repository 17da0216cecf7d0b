"""What Spark needs of a machine: Java, PySpark, and room on the disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kdissect.errors import EnvironmentFailed

if TYPE_CHECKING:
    from kdissect.capture.inputs import InputFile

JAVA_MIN = 17


def java_program() -> str | None:
    """Return the path of `java`: JAVA_HOME's, else the one on PATH; None without one."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    return java if java and os.access(java, os.X_OK) else None


def java_version(java: str) -> str:
    """Return a Java's version, as `java -version` says."""
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    return said.partition('version "')[2].split('"')[0]


def check_java() -> None:
    """Raise EnvironmentFailed with installation advice unless Java 17 or newer is installed."""
    java = java_program()
    hint = "install a JRE, for example: apt-get install openjdk-17-jre-headless"
    if java is None:
        raise EnvironmentFailed(
            f"Java {JAVA_MIN} or newer is needed for Spark and none is found; {hint}"
        )
    version = java_version(java)
    major = version.split(".")[0]
    if major.isdigit() and int(major) < JAVA_MIN:
        raise EnvironmentFailed(f"Java {JAVA_MIN} or newer is needed, {java} is {version}; {hint}")


def check_spark() -> None:
    """Raise EnvironmentFailed with installation advice if PySpark is missing (a slim image)."""
    with suppress(ModuleNotFoundError):
        if find_spec("pyspark") is not None:
            return
    raise EnvironmentFailed(
        "PySpark is needed to dissect and is not installed; pip install 'pyspark>=4.1,<5'. Without "
        "it show, summary, report, sql, readiness and diff read captures"
    )


def check_disk(out: str, inputs: Sequence[InputFile]) -> None:
    """Raise EnvironmentFailed if the disk of `out` has less room than the captures take.

    Tables take about as much room as the captures at most.
    """
    from kdissect.capture.object_store import is_remote

    if is_remote(out):
        return
    needed = sum(item.size for item in inputs if item.error is None)
    place = Path(out).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise EnvironmentFailed(
            f"{place}: {free >> 20} MB free, about {needed >> 20} MB needed; free some space "
            "or name another --out"
        )
