"""The incidents that kdissect finds in a recording, beside the truth of its script."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import kdissect
from tests.material import key_log

START_MS_MAX = 100
SUFFIX = ".pcap.gz"
CAPTURE = "(this capture)"  # the subject of incidents of the capture itself


@dataclass(frozen=True)
class Incident:
    """One true incident. Times are RFC 3339 in UTC."""

    kind: str
    subject: str
    start_time: str
    end_time: str


@dataclass(frozen=True)
class Finding:
    """A row of the table `incidents`."""

    kind: str
    severity: str
    subject: str
    start: datetime
    text: str

    @property
    def label(self) -> str:
        """Kind, subject and severity; of a capture the name of its file."""
        subject = Path(self.subject).name if self.subject.startswith("/") else self.subject
        return f"{self.kind} {subject} ({self.severity})"


@dataclass
class Verdict:
    """One capture's truth beside the findings.

    pairs: each true incident, and the finding for it. others: the findings that no true incident
    explains.
    """

    name: str
    pairs: list[tuple[Incident, Finding | None]]
    others: list[Finding] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Every difference from the truth, as text; none for a right result."""
        faults = [f for truth, finding in self.pairs for f in _faults(truth, finding, self.name)]
        alarms = [one for one in self.others if one.severity != "info"]
        return faults + [f"also found: {one.label}: {one.text}" for one in alarms]


def truths(folder: Path) -> dict[str, list[Incident]]:
    """The true incidents of each capture of a folder."""
    rows: dict[str, Any] = json.loads((folder / "truth.json").read_text())
    return {name: [Incident(**one) for one in row["incidents"]] for name, row in rows.items()}


def findings(path: Path) -> list[Finding]:
    """The incidents that kdissect finds in a capture; a key log beside it is used."""
    tables = kdissect.read(path, keylog=key_log(path))
    return [
        Finding(row["kind"], row["severity"], row["subject"], row["start_time"], row["text"])
        for row in tables.incidents().to_pylist()
    ]


def compare(name: str, expected: Sequence[Incident], found: Sequence[Finding]) -> Verdict:
    """Match findings to the truth: of the same kind, the right subject and the nearest start."""
    left = list(found)
    pairs: list[tuple[Incident, Finding | None]] = []
    for truth in expected:
        alike = [one for one in left if one.kind == truth.kind]
        right = [one for one in alike if is_subject(truth, one, name)] or alike
        best = min(right, key=lambda one: abs(error_ms(truth, one)), default=None)
        pairs.append((truth, best))
        if best is not None:
            left.remove(best)
    return Verdict(name, pairs, left)


def is_subject(truth: Incident, finding: Finding, name: str) -> bool:
    if truth.subject == CAPTURE:
        return finding.subject.endswith(name + SUFFIX)
    return finding.subject == truth.subject


def error_ms(truth: Incident, finding: Finding) -> float:
    return (finding.start - datetime.fromisoformat(truth.start_time)).total_seconds() * 1000


def _faults(truth: Incident, finding: Finding | None, name: str) -> list[str]:
    if finding is None:
        return [f"not found: {truth.kind} of {truth.subject}"]
    faults = []
    if not is_subject(truth, finding, name):
        faults.append(f"subject of {truth.kind}: {finding.subject}, not {truth.subject}")
    if abs(error := error_ms(truth, finding)) > START_MS_MAX:
        faults.append(f"start of {truth.kind}: {error:+.0f} ms")
    return faults


def judge(folder: Path, name: str) -> Verdict:
    """The verdict on one recorded capture."""
    return compare(name, truths(folder)[name], findings(folder / (name + SUFFIX)))
