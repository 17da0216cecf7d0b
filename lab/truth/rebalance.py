"""Rebalances in `group_events` beside the coordinator's log.

The coordinator logs why it prepares a rebalance, and each generation with its number of members.
"""

import re
from collections import Counter
from pathlib import Path

from kdissect import Tables
from lab.truth.section import RIGHT, UNDECIDED, Judged, Section, recordings

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


def compare(_: str, tables: Tables, capture: Path) -> Judged:
    """Generations and their causes."""
    log = capture.with_name("server.log")
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
            counts[UNDECIDED] += 1
            continue
        if int(match[1]) == members:
            counts[RIGHT] += 1
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


SECTION = Section(
    "Rebalance",
    "Rebalances of classic groups in `group_events` beside the coordinator's log: each generation "
    "with its number of members, and the cause: the member that joined or left.",
    compare,
    recordings,
    (RIGHT, UNDECIDED, "cause right", "cause undecided"),
)
