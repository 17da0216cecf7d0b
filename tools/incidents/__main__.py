"""Record incidents with a known truth, or measure what kdissect finds in them.

    python -m tools.incidents record [NAME ...] [--variant N] [--out FOLDER]
    python -m tools.incidents measure [--recorded FOLDER] [--healthy FOLDER ...] [--report FILE]

`record` starts real brokers and clients on loopback and needs the right to capture there.
"""

from __future__ import annotations

import argparse
import inspect
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

from tools.incidents import brokers, connections, derived, groups, storms
from tools.incidents.known import healthy_captures, known_kinds
from tools.incidents.measure import findings, judge, table, truths
from tools.incidents.scene import Scenario, Scene, write

ROOT = Path(__file__).resolve().parents[2]
CAPTURES = ROOT / "captures"
RECORDED = CAPTURES / "incidents"
SHARED = ROOT.parent / "shared" / "captures"
HEAD = """# Incidents: found and true

What `kdissect incidents` finds in captures of real brokers and clients, beside the truth that the
recording script wrote from its own clock.
`python -m tools.incidents measure --report reports/incidents.md` writes this page.
"""
SCENARIOS: dict[str, Scenario] = {
    function.__name__: function
    for function in (
        brokers.broker_killed,
        brokers.node_killed,
        brokers.broker_paused,
        brokers.responses_delayed,
        brokers.port_refuses,
        brokers.network_silent,
        brokers.advertised_wrong,
        brokers.advertised_silent,
        brokers.leader_moved,
        brokers.controlled_shutdown,
        connections.idle_cut,
        connections.idle_reset,
        connections.upload_slow,
        connections.certificate_expired,
        connections.authority_unknown,
        connections.tls_to_plaintext,
        connections.plaintext_to_tls,
        connections.password_wrong,
        connections.password_wrong_scram,
        connections.connections_stormed,
        connections.secure_sessions,
        groups.member_slow,
        groups.member_flaps,
        groups.transaction_hangs,
        groups.batch_too_large,
        groups.retries_duplicate,
        groups.retries_duplicate_plain,
        groups.group_sessions,
        groups.transactions_committed,
        storms.metadata_stormed,
        storms.retries_stormed,
        storms.quota_exceeded,
        derived.packets_lost,
        derived.clock_stepped,
    )
}


def record(names: list[str], variant: int, out: Path) -> int:
    """Record scenes into a folder; returns the count of those that failed."""
    failed = 0
    for name in names or SCENARIOS:
        scenario = SCENARIOS[name]
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


def measure(recorded: Path, healthy: list[Path], report: Path | None) -> int:
    """Print every difference from the truth, write the report; returns their count."""
    verdicts, faults = [], 0
    for name in truths(recorded):
        verdict = judge(recorded, name)
        verdicts.append(verdict)
        faults += len(verdict.faults)
        print(f"{name}: {'; '.join(verdict.faults) or 'right'}", flush=True)
    lines = ["| capture | true incidents | found above info | info |", "|---|---|---|---:|"]
    for path in healthy_captures(healthy):
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
    if report is not None:
        sections = (HEAD, "## Recorded incidents\n", table(verdicts), "\n## Other captures\n")
        report.write_text("\n".join([*sections, *lines]) + "\n")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recorder = verbs.add_parser("record")
    recorder.add_argument("name", nargs="*", choices=[*SCENARIOS, []])
    recorder.add_argument("--variant", type=int, default=0)
    recorder.add_argument("--out", type=Path, default=RECORDED)
    measurer = verbs.add_parser("measure")
    measurer.add_argument("--recorded", type=Path, default=RECORDED)
    measurer.add_argument("--healthy", type=Path, nargs="*", default=[CAPTURES, SHARED])
    measurer.add_argument("--report", type=Path, help="write the tables into this file")
    given = parser.parse_args()
    if given.verb == "record":
        sys.exit(record(given.name, given.variant, given.out) > 0)
    sys.exit(measure(given.recorded, given.healthy, given.report) > 0)


if __name__ == "__main__":
    main()
