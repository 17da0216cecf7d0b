"""`kdissect replay` as a user runs it, and its JSON lines."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
EVERYTHING = ("--allow", "produce,groups,transactions,admin")


@dataclass
class Replayed:
    """A finished replay. rows: one per exchange; run, summary: the first and last line; seconds:
    of the whole command."""

    status: int
    output: str
    errors: str
    run: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    seconds: float = 0.0

    @property
    def verdicts(self) -> Counter[str]:
        return Counter(row["verdict"] for row in self.rows)

    def differences(self) -> set[tuple[str, str, str, str]]:
        """(API, path without indices, captured, answered) of differences without a rule."""
        return {
            (row["api_name"], each["place"], each["captured"], each["answered"])
            for row in self.rows
            for each in row["differences"]
            if not each["rule"]
        }

    def causes(self) -> set[tuple[str, str, str, str]]:
        """Those of `differences` that do not follow from another exchange's. An error code stands
        for the other fields of its struct."""
        found = set()
        for row in self.rows:
            if row["follows"]:
                continue
            telling = [each for each in row["differences"] if not each["rule"]]
            failed = {
                each["path"].rpartition(".")[0]
                for each in telling
                if each["path"].endswith("error_code")
            }
            for each in telling:
                holder, _, name = each["path"].rpartition(".")
                if holder in failed and not name.endswith("error_code"):
                    continue
                found.add((row["api_name"], each["place"], each["captured"], each["answered"]))
        return found

    def explain(self) -> str:
        """For a failing assertion."""
        bad = [row for row in self.rows if row["verdict"] in ("different", "error")]
        return "\n".join(
            [
                self.errors[-2000:],
                *(
                    f"step {row['step']} {row['api_name']} {row['verdict']} {row['reason']} "
                    f"{[each for each in row['differences'] if not each['rule']][:5]}"
                    for row in bad[:20]
                ),
            ]
        )


def start(
    source: Path | str, address: str, *options: str, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """The process of a replay."""
    command = [sys.executable, "-m", "kdissect", "replay", str(source), "--to", address, *options]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
    )


def replay(
    source: Path | str,
    address: str,
    lines: Path,
    *options: str,
    timeout: float = 300,
    env: dict[str, str] | None = None,
) -> Replayed:
    """Replay and read the JSON lines, which are written to `lines`."""
    lines.unlink(missing_ok=True)
    began = time.monotonic()
    process = start(source, address, "--json", str(lines), *options, env=env)
    done = finish(process, lines, timeout)
    done.seconds = time.monotonic() - began
    return done


def after_plan(process: subprocess.Popen[str], seconds: float) -> None:
    """Wait until the plan was printed, and then some time: the run has begun."""
    for line in process.stderr:
        if line.startswith("Pace "):
            break
    time.sleep(seconds)


def finish(process: subprocess.Popen[str], lines: Path, timeout: float = 300) -> Replayed:
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert "Traceback" not in errors, errors
    told = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return Replayed(
        process.returncode,
        output,
        errors,
        told[0] if told else {},
        [row for row in told if row["type"] == "exchange"],
        told[-1] if told else {},
    )
