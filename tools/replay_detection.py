"""Write `reports/replay-detection.md`: which lies of a broker a replay reports.

    python -m tools.replay_detection [--capture NAME] [--budget MINUTES] [--pace P] [--once]

A proxy in front of an empty broker changes its answers (`tests/broker/lies.py`). An honest run
shows which lies a capture has room for. Lies about different APIs share a run: one counts as
reported there if an exchange of its API differs at its field. A lie that is not reported so is told
again in a run of its own, and counts as reported if that run does not end with exit code 0. Results
are stored in `reports/replay-detection.json`; a later run goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from kdissect.replay.comparison.grouping import plain_path
from tests.broker.clients import RECORDED, Recorded
from tests.broker.kafka_broker import Broker, free_ports
from tests.broker.lies import RECORD_KINDS, Lie, LyingProxy
from tests.broker.replaying import EVERYTHING, Replayed, replay

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "reports" / "replay-detection.json"
PAGE = ROOT / "reports" / "replay-detection.md"
OPEN = "open"  # not reported in a run with others, not told alone yet
NOT_TOLD = "not told"
LOUD = frozenset({"error", "no error", "emptied"})  # what follows from them hides other lies
ROOTS = frozenset({"CreateTopics", "FindCoordinator", "InitProducerId", "JoinGroup", "Metadata"})
# The worst lies are told first: a budget may end before all are.
ORDER = [
    *RECORD_KINDS, "emptied", "error", "zero", "shortened", "doubled", "plus 1", "30 s", "other id",
    "no error", "other text", "plus 5000", "no text", "flipped", "other bytes",
]  # fmt: skip
Result = dict[str, Any]
# Lies that may pass, by the end of their field's path, with the reason.
EXCUSED = {
    "finalized_features_epoch": "an offset of the metadata log; no other answer to a client has it",
    "error_message": "text for people; the error code beside it is compared",
}


def run(
    recorded: Recorded, lies: list[Lie], pace: str, *, is_looking: bool = False
) -> tuple[Replayed, LyingProxy]:
    """A capture against an empty broker through the proxy."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_ports(1)[0]
        options = recorded.broker()
        folders = Path(folder)
        # The broker's own connections do not go through the proxy.
        broker = Broker(
            folders / "broker",
            recorded.kafka_version,
            listeners={"INTERNAL": "PLAINTEXT"},
            **options,
        )
        own = broker.address_of("INTERNAL")
        broker.settings["inter.broker.listener.name"] = "INTERNAL"
        broker.settings["advertised.listeners"] = f"PLAINTEXT://127.0.0.1:{port},INTERNAL://{own}"
        with broker:
            liar = LyingProxy(port, broker.ports["PLAINTEXT"], lies, is_looking=is_looking)
            with liar.running() as proxy:
                done = replay(
                    recorded.path, f"127.0.0.1:{port}", folders / "replay.jsonl", *EVERYTHING,
                    *recorded.options(), "--pace", pace, "--timeout", "10s", timeout=600,
                )  # fmt: skip
    assert isinstance(proxy, LyingProxy)
    return done, proxy


def is_reported(lie: Lie, done: Replayed) -> bool:
    """Return whether an exchange of the lie's API differs at its field, above or below it."""
    wanted = lie.path.replace("_ms", "")
    leaf = wanted.rpartition(".")[2]
    for row in done.rows:
        if row["api_name"] != lie.api:
            continue
        for each in row["differences"]:
            path = plain_path(each["path"]).replace("_ms", "")
            is_near = path.startswith(wanted) or wanted.startswith(path) or leaf in path
            if not each["rule"] and is_near:
                return True
    return False


def rounds(lies: list[Lie]) -> list[list[Lie]]:
    """Lies that share a run: no two of one API that meet. What the answers of `ROOTS` say decides
    whether other requests are sent at all, so they have runs apart from the others."""
    shared: list[list[Lie]] = []
    for is_root in (False, True):
        own: list[list[Lie]] = []
        for lie in lies:
            if (lie.api in ROOTS) != is_root:
                continue
            free = (each for each in own if not any(do_meet(lie, other) for other in each))
            place = next(free, None)
            if place is None:
                own.append([lie])
            else:
                place.append(lie)
        shared += own
    return shared


def do_meet(one: Lie, other: Lie) -> bool:
    """Whether two lies are about one struct of an API, or one is about a part of the other's."""
    if one.api != other.api:
        return False
    structs = [lie.path.rpartition(".")[0] for lie in (one, other)]
    is_part = one.path.startswith(other.path) or other.path.startswith(one.path)
    return is_part or structs[0] == structs[1] or LOUD & {one.kind, other.kind} != set()


def measure(
    recorded: Recorded, pace: str, is_once: bool, end: float, results: dict[str, Result]
) -> None:
    """All lies of a capture that have no result yet, until `end` (time.monotonic())."""
    known = results.setdefault(recorded.name, {"honest": {}, "lies": {}})
    if not known["honest"]:
        done, proxy = run(recorded, [], pace, is_looking=True)
        verdicts = dict(done.verdicts)
        known["honest"] = {"status": done.status, "pace": pace, "verdicts": verdicts}
        known["seen"] = {api: sorted(map(list, seen)) for api, seen in proxy.seen.items() if seen}
        save(results)
    lies = [
        Lie(api, path, kind, is_once)
        for api, seen in known["seen"].items()
        for path, kind in seen
        if known["lies"].get(str(Lie(api, path, kind, is_once)), {}).get("reported", OPEN) == OPEN
    ]
    lies.sort(key=lambda lie: (ORDER.index(lie.kind), lie.path))
    left = [lie for lie in lies if str(lie) in known["lies"]]
    tell_alone(left, recorded, pace, end, results)
    again: list[Lie] = []
    for shared in rounds([lie for lie in lies if lie not in left]):
        if time.monotonic() > end:
            return
        done, proxy = run(recorded, shared, pace)
        for lie in shared:
            is_clear = bool(proxy.told[lie]) and is_reported(lie, done)
            said = "in its exchange" if is_clear else OPEN
            known["lies"][str(lie)] = {"told": proxy.told[lie], "reported": said}
            again += [] if is_clear else [lie]
        save(results)
        said = f"{len(known['lies'])} told, {len(again)} of them to be told alone"
        sys.stderr.write(f"{recorded.name}: {said}\n")
    tell_alone(again, recorded, pace, end, results)


def tell_alone(
    lies: list[Lie], recorded: Recorded, pace: str, end: float, results: dict[str, Result]
) -> None:
    """Each in a run of its own, until `end`."""
    known = results[recorded.name]["lies"]
    for lie in lies:
        if time.monotonic() > end:
            return
        done, proxy = run(recorded, [lie], pace)
        said = "in its exchange" if is_reported(lie, done) else "by the run" if done.status else ""
        if not proxy.told[lie]:
            said = NOT_TOLD
        known[str(lie)] = {"told": proxy.told[lie], "reported": said}
        sys.stderr.write(f"{lie}: {said or 'NOT REPORTED'}\n")
        save(results)


# -- the page -------------------------------------------------------------------------------


def save(results: dict[str, Result]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(results))


def page(results: dict[str, Result]) -> str:
    """The report."""
    names = (
        "capture",
        "pace",
        "honest",
        "room for",
        "run",
        "reported",
        "open",
        "excused",
        "passed",
    )
    lines = [HEAD, "| " + " | ".join(names) + " |", "|---|---|---|" + "---:|" * 6]
    missed: list[tuple[str, str]] = []
    opened: list[tuple[str, str]] = []
    for name, known in sorted(results.items()):
        told = {lie: each for lie, each in known["lies"].items() if each["reported"] != NOT_TOLD}
        silent = [lie for lie, each in told.items() if not each["reported"]]
        excused = [lie for lie in silent if excuse(lie)]
        missed += [(name, lie) for lie in silent]
        left = [lie for lie, each in told.items() if each["reported"] == OPEN]
        opened += [(name, lie) for lie in left]
        reported = len(told) - len(silent) - len(left)
        honest, room = known["honest"], sum(map(len, known["seen"].values()))
        cells = [name, honest["pace"], f"exit {honest['status']}", room, len(told), reported]
        cells += [len(left), len(excused), len(silent) - len(excused)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "## Lies that pass", ""]
    lines += ["| capture | API, field, kind | why it may |", "|---|---|---|"]
    lines += [f"| {name} | {lie} | {excuse(lie) or '**none**'} |" for name, lie in sorted(missed)]
    lines += ["", "## Open", "", "| capture | API, field, kind |", "|---|---|"]
    lines += [f"| {name} | {lie} |" for name, lie in sorted(opened)]
    lines += ["", "## By kind", "", "| kind | run | reported |", "|---|---:|---:|"]
    kinds: dict[str, list[bool]] = defaultdict(list)
    for known in results.values():
        for lie, each in known["lies"].items():
            if each["reported"] != NOT_TOLD:
                kinds[kind_of(lie)].append(each["reported"] not in ("", OPEN))
    lines += [f"| {kind} | {len(each)} | {sum(each)} |" for kind, each in sorted(kinds.items())]
    return "\n".join(lines) + "\n"


def kind_of(lie: str) -> str:
    """The kind in a lie's text, which may be several words."""
    return " ".join(lie.removesuffix(" once").split(" ")[2:])


def excuse(lie: str) -> str:
    """Return the reason why a lie may pass; "" for lies about record data."""
    path = lie.split(" ")[1]
    if kind_of(lie) in RECORD_KINDS:
        return ""
    return next((why for end, why in EXCUSED.items() if path.endswith(end)), "")


HEAD = """# Lies that a replay reports

Made by `python -m tools.replay_detection`; do not edit. A proxy in front of a real broker changes
one field in the responses of one API (`tests/broker/lies.py`; kio encodes them). It does so in
every response or, as *once*, in the first that has room for it. Each lie runs in a replay of a
capture that an honest broker passes (*honest* is the exit code then). *Room for* counts the lies
that these responses have room for; *run* counts those that were measured so far. *Open* are lies
that were not reported in a run with others, and did not run alone yet.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capture", action="append", help="its name; sarama if left out")
    parser.add_argument("--budget", type=float, default=60, help="minutes")
    parser.add_argument("--pace", default="recorded", help="of the replays")
    parser.add_argument("--once", action="store_true", help="each lie in one answer only")
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    end = time.monotonic() + given.budget * 60
    for recorded in RECORDED:
        if recorded.name in (given.capture or ["sarama"]):
            measure(recorded, given.pace, given.once, end, results)


if __name__ == "__main__":
    main()
