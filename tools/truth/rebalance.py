"""Rebalances in `group_events` beside the coordinator's log.

The coordinator logs why it prepares a rebalance, and each generation with its number of members.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import kdissect
from kdissect import Tables
from tools.truth import logged
from tools.truth.loss import LOST, without_packets

_GENERATION = re.compile(r"Stabilized group (\S+) generation (\d+) with (\d+) members")
_MEMBERS = re.compile(r"generation \d+ of (\d+) members?: ([^;]*)")
_CAUSE = re.compile(
    r"Preparing to rebalance group (\S+) in state \S+ with old generation (\d+) \(reason: "
    r"(?:Adding new member (\S+)|explicit `LeaveGroup` request for \((\S+)\))"
)
Generation = tuple[str, int]  # group, number


def read_generations(log: Path) -> dict[Generation, int]:
    """The number of members of each generation of a log; those without members are left out."""
    text = log.read_text(errors="replace")
    found = ((match[1], int(match[2]), int(match[3])) for match in _GENERATION.finditer(text))
    return {(group, number): members for group, number, members in found if members}


def read_causes(log: Path) -> dict[Generation, str]:
    """The member whose join or leave began the rebalance to a generation."""
    text = log.read_text(errors="replace")
    return {
        (match[1], int(match[2]) + 1): f"{match[3]} joined" if match[3] else f"{match[4]} left"
        for match in _CAUSE.finditer(text)
    }


def compare(tables: Tables, log: Path) -> tuple[Counter[str], list[str]]:
    """Counts of generations and of causes (`right`, `undecided`), and lines about wrong ones."""
    rows = tables.group_events.to_arrow().to_pylist()
    seen = {
        (row["group_id"], row["generation"]): row["detail"]
        for row in rows
        if row["event"] == "rebalance"
    }
    generations, causes = read_generations(log), read_causes(log)
    counts, wrong = Counter[str](), []
    for key in sorted(seen.keys() - generations.keys()):
        wrong.append(f"{key[0]} has no generation {key[1]}")
    for key, members in generations.items():
        match = _MEMBERS.search(seen.get(key, ""))
        if match is None:
            counts["undecided"] += 1
            continue
        if int(match[1]) == members:
            counts["right"] += 1
        else:
            wrong.append(f"{key[0]} generation {key[1]}: {match[1]} members for {members}")
        why = seen[key].partition("why: ")[2]
        member = causes.get(key, "").partition(" ")[0]
        is_open = f"{member} did not come back" in why or not re.search(r" (joined|left)", why)
        if key not in causes or is_open:
            counts["cause undecided"] += key in causes
        elif causes[key] in why:
            counts["cause right"] += 1
        else:
            wrong.append(f"{key[0]} generation {key[1]}: {why} for {causes[key]}")
    return counts, wrong


def section(_: Path) -> str:
    """The section of the page."""
    lines, all_wrong = [], []
    for path in logged.made():
        cells = [path.name]
        for share in (0.0, LOST):
            with without_packets(path / "capture.pcap", share) as capture:
                counts, wrong = compare(kdissect.read(capture), path / "server.log")
            all_wrong += [f"{path.name}: {line}" for line in wrong]
            cells += [str(counts[name]) for name in ("right", "undecided")]
            cells += [str(counts[f"cause {name}"]) for name in ("right", "undecided")]
            cells.append(str(len(wrong)))
        lines.append(f"| {' | '.join(cells)} |")
    heads = "generations right | undecided | causes right | undecided | wrong"
    return "\n".join(
        [
            "## Rebalance",
            "",
            "Rebalances of classic groups in `group_events` beside the coordinator's log: each "
            "generation with its number of members, and the member that joined or left. The same "
            f"with {LOST:.0%} of the packets removed.",
            *(["", f"Wrong: {'; '.join(all_wrong)}."] if all_wrong else []),
            "",
            f"| recording | {heads} | with loss: {heads} |",
            f"|---|{'---:|' * 10}",
            *lines,
        ]
    )
