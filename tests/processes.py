"""Programs in processes of their own, for what a process alone shows."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
ROOT = Path(__file__).resolve().parent.parent
KDISSECT = (sys.executable, "-m", "kdissect")


def run(
    *command: str | Path,
    cwd: Path | str = ROOT,
    timeout_s: float | None = 300,
    check: bool = False,
    **variables: str,
) -> Done:
    """Run a program with some more variables in its environment, and read what it prints."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=check,
    )
