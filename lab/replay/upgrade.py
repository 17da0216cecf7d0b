"""Gate: captures of clients on one release, replayed to the same and to the next one."""

import argparse
import json
from pathlib import Path

from lab.replay.captures import RECORDED
from lab.replay.record import FOLDER, difference, state
from lab.replay.runs import VERDICTS, cells, run, run_recorded, show, target
from tests.broker.kafka_broker import BEFORE, LATEST
from tests.broker.replaying import Replayed

HEAD = ("capture", "to", "exit", *VERDICTS, "at end", "seconds", "state")
WIDTHS = (24, 6, 4, 6, 9, 9, 5, 7, 6, 7, 8)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="CAPTURE", help="parts of names; without: all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="recordings of `record`")
    parser.add_argument("--to", action="append", metavar="RELEASE")
    parser.add_argument("--pace", default="max")
    parser.add_argument("--lines", type=int, default=8, help="of findings to print")


def main(given: argparse.Namespace) -> int:
    """Return the count of runs that differ in exit code or state."""
    print(cells(HEAD, WIDTHS), flush=True)
    failed = 0

    def is_wanted(name: str) -> bool:
        return not given.names or any(each in name for each in given.names)

    for to in given.to or (BEFORE, LATEST):
        for path in sorted(given.folder.glob("*.pcap")):
            if is_wanted(path.stem):
                done, held = run_recording(path, to, "--pace", given.pace)
                failed += _differs(path.stem, to, done, given.lines, held)
        for recorded in RECORDED:
            if recorded.kafka_version == BEFORE and recorded.path.exists():
                if is_wanted(recorded.name):
                    done = run_recorded(recorded, to, "--pace", given.pace)
                    failed += _differs(recorded.name, to, done, given.lines)
    print(f"{failed} runs with a difference")
    return failed


def run_recording(path: Path, to: str, *options: str) -> tuple[Replayed, list[str]]:
    """Replay a recording to a fresh broker, and what that broker holds otherwise than recorded."""
    about = json.loads(path.with_suffix(".json").read_text())
    with target(to, settings=about["settings"]) as (broker,):
        done = run(path, broker.address, *options)
        return done, difference(about, state(broker.address))


def _differs(name: str, to: str, done: Replayed, lines: int, held: list[str] | None = None) -> bool:
    """Print a run; return whether it differs."""
    same = "-" if held is None else f"{len(held)} other" if held else "equal"
    show((name, to), done, WIDTHS, lines, same)
    for line in (held or ())[:3]:
        print(f"    {line[:300]}", flush=True)
    return bool(done.status or held)
