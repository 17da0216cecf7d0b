"""Write `reports/replay-detection.md`: which lies of a broker a replay reports.

    python -m tools.replay_detection [--capture NAME] [--budget MINUTES] [--pace P] [--once]

A proxy in front of an empty broker changes its answers (`tests/broker/lies.py`). An honest run
shows which lies a capture has room for; those that were measured with another capture are left out.
Lies that do not meet share a run: one counts as reported there if an exchange of its API differs at
its field, and no other lie can be the cause. The others run again in smaller groups. If such a run
finds nothing, all of its lies pass; if a run with one lie alone finds anything, it reports it.
Results are stored in `reports/replay-detection.json`; a later run goes on with what is missing, and
repeats the lies that passed without an excuse.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kdissect.replay.comparison.grouping import plain_path
from kdissect.text import plural
from tests.broker.clients import RECORDED, Recorded
from tests.broker.kafka_broker import Broker, free_ports
from tests.broker.lies import CONNECTION, DELAYED, RECORD_KINDS, SWALLOWED, Lie, LyingProxy
from tests.broker.replaying import EVERYTHING, Replayed, replay

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "reports" / "replay-detection.json"
PAGE = ROOT / "reports" / "replay-detection.md"
OPEN = "open"  # not reported in a run with others, not in a smaller group yet
_ONCE = " once"  # ends the text of a lie in one answer only
NO_ROOM = "no room"  # no answer had a value that could be changed
AGAIN = 6  # lies in a run, after the first one
LOUD = frozenset({"error", "no error"})  # they hide other lies about their struct
ROOTS = frozenset({"CreateTopics", "FindCoordinator", "InitProducerId", "JoinGroup", "Metadata"})
# Fields by which the comparison finds the captured struct. Another value hides the struct.
KEYS = frozenset(
    {
        "api_key", "broker_id", "group_id", "index", "key", "member_id", "name", "node_id",
        "partition", "partition_index", "principal", "producer_id", "resource_name",
        "resource_type", "topic", "topic_id", "topic_name", "transactional_id",
    }
)  # fmt: skip
# The worst lies run first: a budget may end before all have run.
ORDER = [
    *RECORD_KINDS, "emptied", "error", "null", "zero", "shortened", "doubled", "plus 1", "30 s",
    "other id", "no error", "cut", SWALLOWED, DELAYED, "other text", "plus 5000", "no text",
    "flipped", "other bytes",
]  # fmt: skip
Result = dict[str, Any]
Finding = tuple[str, str]
# Lies that may pass, by a part of their text, with the reason.
EXCUSED = {
    "DescribeLogDirs results[].log_dir": "a folder of the target's machine",
    "_timestamp plus 1": "a millisecond, and clocks agree to a second",
    "partition_size": "bytes on the target's disks, which its retention may have deleted",
    "DescribeLogDirs results[].total_bytes": "the space of the target's disks",
    "DescribeLogDirs results[].usable_bytes": "the space of the target's disks",
    "error_message": "text for people; the error code beside it is compared",
    "DescribeQuorum nodes[].listeners[]": "an address of controllers, to which the replay does not "
    "connect",
    "status_detail": "text for people; the status code beside it is compared",
    **dict.fromkeys(
        (
            "DescribeAcls resources shortened once",
            "DescribeClientQuotas entries shortened once",
            "DescribeClientQuotas entries[].values shortened once",
            "DescribeUserScramCredentials results shortened once",
            "ListConfigResources config_resources shortened once",
        ),
        "the missing one was made within the last second; brokers apply that after the controller",
    ),
}


def run(
    recorded: Recorded, lies: list[Lie], pace: str, *, is_looking: bool = False
) -> tuple[Replayed, LyingProxy]:
    """A capture against an empty broker through the proxy."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_ports(1)[0]
        options = recorded.broker()
        listeners = options.pop("listeners", {}) | {"INTERNAL": "PLAINTEXT"}
        folders = Path(folder)
        broker = Broker(folders / "broker", recorded.kafka_version, listeners=listeners, **options)
        # The broker's own connections do not go through the proxy.
        own, public = broker.address_of("INTERNAL"), recorded.listener
        broker.settings["inter.broker.listener.name"] = "INTERNAL"
        broker.settings["advertised.listeners"] = f"{public}://127.0.0.1:{port},INTERNAL://{own}"
        with broker:
            liar = LyingProxy(port, broker.ports[public], lies, is_looking=is_looking)
            with liar.running() as proxy:
                done = replay(
                    recorded.path, f"127.0.0.1:{port}", folders / "replay.jsonl", *EVERYTHING,
                    *recorded.options(), "--pace", pace, "--timeout", "10s",
                    timeout=600, env=recorded.login(),
                )  # fmt: skip
    assert isinstance(proxy, LyingProxy)
    return done, proxy


def findings(done: Replayed) -> set[Finding]:
    """What a replay reports: the API and field of each difference, APIs without an answer, and the
    subjects of findings about the whole run."""
    found = {
        (row["api_name"], _comparable(plain_path(each["path"])))
        for row in done.rows
        for each in row["differences"]
        if not each["rule"]
    }
    found |= {(row["api_name"], CONNECTION) for row in done.rows if row["verdict"] == "error"}
    return found | {(each["kind"], each["subject"]) for each in done.summary["findings"]}


def is_reported(lie: Lie, found: set[Finding], lies: Iterable[Lie] = ()) -> bool:
    """Return whether an exchange of the lie's API differs at its field or below it. A field above
    it, or one of the same name, counts if no other one of `lies`, which share the run, is there."""
    wanted = _comparable(lie.path)
    others = [_comparable(each.path) for each in lies if each.api == lie.api and each != lie]

    def is_about(path: str, other: str) -> bool:
        leaf = other.rpartition(".")[2]
        return f"{other}.".startswith(f"{path}.") or path.rpartition(".")[2] == leaf

    return any(
        f"{path}.".startswith(f"{wanted}.")
        or (is_about(path, wanted) and not any(is_about(path, other) for other in others))
        for api, path in found
        if api == lie.api
    )


def _comparable(path: str) -> str:
    """A path without indices and units, which kio and Kafka's definitions write in two ways."""
    return path.replace("[]", "").replace("_ms", "")


def rounds(lies: list[Lie], *, is_again: bool = False) -> list[list[Lie]]:
    """Lies that share a run: no two that meet. The answers of `ROOTS` decide whether other requests
    are sent at all, so they have runs apart from the others. is_again: a few lies, one of an API:
    two may agree with each other."""
    shared: list[list[Lie]] = []
    for is_root in (False, True):
        own: list[list[Lie]] = []
        for lie in lies:
            if (lie.api in ROOTS) != is_root:
                continue
            free = (
                each
                for each in own
                if not (is_again and len(each) == AGAIN)
                and not any(
                    do_meet(lie, other) or (is_again and lie.api == other.api) for other in each
                )
            )
            place = next(free, None)
            if place is None:
                own.append([lie])
            else:
                place.append(lie)
        shared += own
    return shared


def do_meet(one: Lie, other: Lie) -> bool:
    """Return whether one of two lies of an API hides the other. Lies about connections share runs
    with each other only."""
    if CONNECTION in (one.path, other.path):
        return one.kind != other.kind or one.api == other.api
    if one.api != other.api:
        return False
    paths = [lie.path.replace("[]", "") + "." for lie in (one, other)]
    return (
        paths[0].startswith(paths[1])
        or paths[1].startswith(paths[0])
        or _hides(one, paths[1])
        or _hides(other, paths[0])
    )


def _hides(lie: Lie, path: str) -> bool:
    """Return whether a lie hides another one at `path`, which is in the same struct or below it."""
    struct, _, name = lie.path.replace("[]", "").rpartition(".")
    return (lie.kind in LOUD or name in KEYS) and path.startswith(struct)


def measure(
    recorded: Recorded, pace: str, is_once: bool, end: float, results: dict[str, Result]
) -> None:
    """All lies of a capture that have no result yet, until `end` (time.monotonic())."""
    known = results.setdefault(recorded.name, {"honest": {}, "lies": {}})
    if not known["honest"]:
        done, proxy = run(recorded, [], pace, is_looking=True)
        known["honest"] = {"status": done.status, "pace": pace, "verdicts": dict(done.verdicts)}
        known["honest"]["findings"] = sorted(map(list, findings(done)))
        known["seen"] = {api: sorted(map(list, seen)) for api, seen in proxy.seen.items() if seen}
        save(results)
    elsewhere = {
        lie for name, other in results.items() if name != recorded.name for lie in other["lies"]
    }
    lies = [
        lie
        for lie in sorted(
            room(known, is_once=is_once), key=lambda lie: (ORDER.index(lie.kind), lie.path)
        )
        if str(lie) not in elsewhere and _is_to_run(str(lie), known["lies"])
    ]
    opened = [lie for lie in lies if str(lie) in known["lies"]]
    for together in rounds(opened, is_again=True):
        narrow(together, recorded, pace, end, results)
    again: list[Lie] = []
    shared = rounds([lie for lie in lies if lie not in opened])
    shared.sort(key=len, reverse=True)  # most lies in the least time
    for number, together in enumerate(shared, 1):
        if time.monotonic() > end:
            return
        again += run_together(together, recorded, pace, results)
        log(f"{recorded.name}: run {number} of {len(shared)}, {len(again)} lies to run again")
    for together in rounds(again, is_again=True):
        narrow(together, recorded, pace, end, results)


def _is_to_run(lie: str, known: Result) -> bool:
    """Return whether a lie is open, or passed in an earlier run without an excuse."""
    reported = known.get(lie, {}).get("reported", OPEN)
    return reported == OPEN or (not reported and not excuse(lie))


def room(known: Result, *, is_once: bool) -> Iterator[Lie]:
    """The lies that the answers of an honest run have room for."""
    for api, seen in known["seen"].items():
        for path, kind in seen:
            if is_once or kind not in (SWALLOWED, DELAYED):  # each takes the time of a timeout
                yield Lie(api, path, kind, is_once)


def run_together(
    lies: list[Lie], recorded: Recorded, pace: str, results: dict[str, Result]
) -> list[Lie]:
    """Try lies in one run; return those that it leaves open. Findings of the honest run do not
    count."""
    known, left = results[recorded.name]["lies"], []
    done, proxy = run(recorded, lies, pace)
    honest = {(api, path) for api, path in results[recorded.name]["honest"]["findings"]}
    found = findings(done) - honest
    for lie in lies:
        is_clear = bool(proxy.counts[lie]) and is_reported(lie, found, lies)
        said = "in its exchange" if is_clear else OPEN
        if said == OPEN and len(lies) == 1:
            said = "by the run" if found else ""
        if not proxy.counts[lie] and (len(lies) == 1 or not found):
            said = NO_ROOM
        elif said == OPEN and not found:
            said = ""
        known[str(lie)] = {"answers": proxy.counts[lie], "reported": said}
        left += [lie] if said == OPEN else []
        if not said:
            log(f"{lie}: NOT REPORTED")
    save(results)
    return left


def narrow(
    lies: list[Lie], recorded: Recorded, pace: str, end: float, results: dict[str, Result]
) -> None:
    """Try lies in smaller and smaller groups, until `end` or until each has a result."""
    if not lies or time.monotonic() > end:
        return
    left = run_together(lies, recorded, pace, results)
    if left and len(left) == len(lies):
        narrow(left[::2], recorded, pace, end, results)
        narrow(left[1::2], recorded, pace, end, results)
    else:
        narrow(left, recorded, pace, end, results)


def log(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


# -- the page -------------------------------------------------------------------------------


def save(results: dict[str, Result]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(results))


def page(results: dict[str, Result]) -> str:
    """The report."""
    lines = [HEAD, "| " + " | ".join(COLUMNS) + " |", "|---|---|---|" + "---:|" * 5]
    outcomes = {
        (name, lie): each["reported"]
        for name, known in sorted(results.items())
        for lie, each in sorted(known["lies"].items())
        if each["reported"] != NO_ROOM
    }
    for name, known in sorted(results.items()):
        honest = known["honest"]
        own = {key: said for key, said in outcomes.items() if key[0] == name}
        said = f"exit {honest['status']}, {plural(len(honest['findings']), 'finding')}"
        cells = [name, honest["pace"], said, *counts(own)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    run_count, reported, opened, excused, _ = counts(outcomes)
    lines.append("| " + " | ".join(map(str, ["all", "", "", *counts(outcomes)])) + " |")
    share = 100 * reported / max(run_count - opened - excused, 1)
    run_anywhere = {lie for known in results.values() for lie in known["lies"]}
    possible = {str(lie) for known in results.values() for lie in room(known, is_once=False)}
    once = sum(lie.endswith(_ONCE) for lie in run_anywhere)
    lines += ["", f"Reported: {share:.1f} % of those that are decided and not excused. Excused: "
              f"{100 * excused / max(run_count, 1):.1f} % of all that ran. The captures have room "
              f"for {len(possible - run_anywhere)} more lies that did not run yet. Lies that ran "
              f"in one answer only (*once*): {once}."]  # fmt: skip
    silent = [key for key, said in outcomes.items() if not said]
    lines += ["", "## Lies that pass", ""]
    lines += ["| capture | API, field, kind | why it may |", "|---|---|---|"]
    lines += [f"| {name} | {lie} | {excuse(lie) or '**none**'} |" for name, lie in silent]
    lines += ["", "## Open", "", "| capture | API, field, kind |", "|---|---|"]
    lines += [f"| {name} | {lie} |" for (name, lie), said in outcomes.items() if said == OPEN]
    lines += ["", "## By kind", "", "| kind | run | reported |", "|---|---:|---:|"]
    kinds: dict[str, list[bool]] = defaultdict(list)
    for (_, lie), said in outcomes.items():
        kinds[kind_of(lie)].append(said not in ("", OPEN))
    lines += [f"| {kind} | {len(each)} | {sum(each)} |" for kind, each in sorted(kinds.items())]
    return "\n".join(lines) + "\n"


def counts(outcomes: dict[tuple[str, str], str]) -> list[int]:
    """Lies that were run, reported, open, excused, and that passed without an excuse."""
    silent = [lie for (_, lie), said in outcomes.items() if not said]
    opened = sum(said == OPEN for said in outcomes.values())
    excused = sum(bool(excuse(lie)) for lie in silent)
    reported = len(outcomes) - len(silent) - opened
    return [len(outcomes), reported, opened, excused, len(silent) - excused]


def kind_of(lie: str) -> str:
    """The kind in a lie's text, which may be several words."""
    return " ".join(lie.removesuffix(_ONCE).split(" ")[2:])


def excuse(lie: str) -> str:
    """Return the reason why a lie may pass; "" for lies about record data."""
    if kind_of(lie) in RECORD_KINDS:
        return ""
    return next((why for part, why in EXCUSED.items() if part in lie), "")


COLUMNS = ("capture", "pace", "honest", "run", "reported", "open", "excused", "passed")
HEAD = """# Lies that a replay reports

Made by `python -m tools.replay_detection`; do not edit. A proxy in front of a real broker changes
one field in the responses of one API (`tests/broker/lies.py`; kio encodes them). It does so in
every response or, as *once*, in the first that has room for it. A lie about a *connection* cuts it
instead of an answer, swallows the answer, or sends it after the replay's timeout; shorter delays
are findings of `--fail-on latency` only. Each lie runs in a replay of a capture against a fresh
broker. *Honest* is the exit code without a lie, and the number of findings then, which do not count
as reports (DescribeConfigs of admin has the listener that the proxy needs). A capture's row has
only lies that no other capture's row has. *Open* are lies that were not reported in a run with
others, and did not run in a smaller group yet.
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
