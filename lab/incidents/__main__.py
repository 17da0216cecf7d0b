"""Record incidents with a known truth, or measure what kdissect finds in them.

    python -m lab.incidents record [NAME ...] [--variant N] [--out FOLDER]
    python -m lab.incidents measure [--trials FOLDER ...] [--report FILE]

`record` starts real brokers and clients on loopback and needs the right to capture there. Without
names it records the shipped captures; trials are recorded into folders outside the repository.
"""

import argparse
import inspect
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from lab.incidents import brokers, connections, derived, groups, lookalikes, relayed, storms, trials
from lab.incidents.known import healthy_captures, known_kinds
from lab.incidents.scene import Scenario, Scene, write
from tests.incidents.recorded import (
    START_MS_MAX,
    Verdict,
    error_ms,
    findings,
    is_subject,
    judge,
    truths,
)

ROOT = Path(__file__).resolve().parents[2]
CAPTURES = ROOT / "captures"
RECORDED = CAPTURES / "incidents"
SHARED = ROOT.parent / "shared" / "captures"
HEAD = """# Incidents: found and true

What `kdissect incidents` finds in captures of real brokers and clients, beside the truth that the
recording script wrote from its own clock.
`python -m lab.incidents measure --trials FOLDER --report reports/incidents.md` writes this page.
"""
NEW = """
## New recordings

{count} recordings with other clients (Apache Kafka's Java clients, librdkafka, kafka-python),
rates, durations, addresses and times, some with two incidents, others healthy but alike. No
threshold was chosen by them, and they are not in the repository.
`python -m lab.incidents record --trials --variant N --out FOLDER` makes such recordings.
{right} of {count} are right: each incident with its subject, its start within {start_ms} ms, and
nothing else above `info`.
"""


def _scenarios(*modules: ModuleType) -> dict[str, Scenario]:
    """The public functions of modules that take a scene and return nothing."""
    return {
        name: function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and inspect.get_annotations(function, eval_str=True) == {"scene": Scene, "return": None}
    }


SCENARIOS = _scenarios(brokers, connections, groups, storms, derived, relayed)
TRIALS = _scenarios(trials, lookalikes)


def record(names: list[str], variant: int, out: Path) -> int:
    """Record scenes into a folder; returns the count of those that failed."""
    failed = 0
    for name in names:
        scenario = (SCENARIOS | TRIALS)[name]
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        scene = Scene(folder, variant)
        try:
            with scene.stack:
                scenario(scene)
            write(name, inspect.getdoc(scenario) or "", scene, out)
            size = (out / f"{name}.pcap.gz").stat().st_size
            print(f"{name}: {size} bytes, {scene.incidents}", flush=True)
        except Exception:
            failed += 1
            print(f"{name}: failed", file=sys.stderr)
            traceback.print_exc()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return failed


def judged(folder: Path) -> list[Verdict]:
    """The verdicts on the captures of a folder; prints every difference from the truth."""
    verdicts = []
    for name in truths(folder):
        verdict = judge(folder, name)
        verdicts.append(verdict)
        print(f"{name}: {'; '.join(verdict.faults) or 'right'}", flush=True)
    return verdicts


def table(verdicts: Sequence[Verdict]) -> str:
    """Markdown of the verdicts on recorded captures."""
    lines = [
        "| capture | expected | found | subject | start error, ms | others |",
        "|---|---|---|---|---:|---|",
    ]
    for verdict in verdicts:
        others = "<br>".join(one.label for one in verdict.others) or "-"
        if not verdict.pairs:
            lines.append(f"| {verdict.name} | - | - | - | - | {others} |")
        for truth, finding in verdict.pairs:
            cells = [verdict.name, f"{truth.kind} of {truth.subject}"]
            if finding is None:
                cells += ["**no**", "-", "-"]
            else:
                is_right = is_subject(truth, finding, verdict.name)
                subject = "right" if is_right else f"**{finding.subject}**"
                cells += [finding.severity, subject, f"{error_ms(truth, finding):+.0f}"]
            lines.append(f"| {' | '.join(cells)} | {others} |")
    return "\n".join(lines)


def others(folders: list[Path]) -> tuple[list[str], int]:
    """Lines of a table of the captures without recorded incidents, and the count of faults."""
    lines, faults = (
        ["| capture | true incidents | found above info | info |", "|---|---|---|---:|"],
        0,
    )
    for path in healthy_captures(folders):
        found, known = findings(path), known_kinds(path)
        alarms = [one for one in found if one.severity != "info"]
        false_alarms = [one for one in alarms if one.kind not in known]
        missed = known - {one.kind for one in found}
        faults += len(false_alarms) + len(missed)
        for one in false_alarms:
            print(f"{path.name}: {one.label}: {one.text}", flush=True)
        for kind in sorted(missed):
            print(f"{path.name}: not found: {kind}", flush=True)
        cells = (path.name, ", ".join(sorted(known)) or "-")
        labels = "<br>".join(one.label for one in alarms) or "-"
        lines.append(f"| {' | '.join(cells)} | {labels} | {len(found) - len(alarms)} |")
    return lines, faults


def measure(recorded: Path, tried: list[Path], healthy: list[Path], report: Path | None) -> int:
    """Print every difference from the truth, write the report; returns their count."""
    verdicts = judged(recorded)
    new = [verdict for folder in tried for verdict in judged(folder)]
    lines, faults = others(healthy)
    sections = [HEAD, "## Recorded incidents\n", table(verdicts)]
    if new:
        right = sum(not verdict.faults for verdict in new)
        counts = {"count": len(new), "right": right, "start_ms": START_MS_MAX}
        sections += [NEW.format(**counts), table(new)]
    sections += ["\n## Other captures\n", *lines]
    if report is not None:
        report.write_text("\n".join(sections) + "\n")
    return faults + sum(len(verdict.faults) for verdict in (*verdicts, *new))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recorder = verbs.add_parser("record")
    recorder.add_argument("name", nargs="*", choices=[*SCENARIOS, *TRIALS, []])
    recorder.add_argument("--trials", action="store_true", help="record all trials")
    recorder.add_argument("--variant", type=int, default=0)
    recorder.add_argument("--out", type=Path, default=RECORDED)
    measurer = verbs.add_parser("measure")
    measurer.add_argument("--recorded", type=Path, default=RECORDED)
    measurer.add_argument("--trials", type=Path, nargs="*", default=[])
    measurer.add_argument("--healthy", type=Path, nargs="*", default=[CAPTURES, SHARED])
    measurer.add_argument("--report", type=Path, help="write the tables into this file")
    given = parser.parse_args()
    if given.verb == "record":
        names = given.name or (TRIALS if given.trials else SCENARIOS)
        sys.exit(record(list(names), given.variant, given.out) > 0)
    sys.exit(measure(given.recorded, given.trials, given.healthy, given.report) > 0)


if __name__ == "__main__":
    main()
