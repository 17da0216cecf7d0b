"""Odd files beside tshark and capinfos: the same packets, and the same of them TCP.

Where we differ it is on purpose, and KNOWN says why.
"""

import shutil
from pathlib import Path

import pytest

import kdissect
from kdissect.capture.inputs import find_captures
from kdissect.capture.scan import scan
from kdissect.capture.segments import FRAGMENT_PART
from tests.capture.scanned import planned
from tests.cases import cases
from tests.peers.odd_files import cases as odd_files
from tests.processes import run

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(
        shutil.which("tshark") is None or shutil.which("capinfos") is None,
        reason="tshark and capinfos are not installed",
    ),
    pytest.mark.filterwarnings("ignore"),
]

# Case: (packets that are TCP for us alone, for tshark alone, why).
KNOWN: dict[str, tuple[set[int], set[int], str]] = {
    "wrong_headers": ({22}, set(), "IPv6 length 0 is a segment that the network card cut"),
    "tunnels": (
        {4, 35, 36},
        set(),
        "VXLAN on port 8472 (Linux's default); Ethernet pseudowires, tshark guesses their start",
    ),
    "errors": (set(), {1, 2, 3, 5, 6}, "ICMP errors quote TCP, nobody sent it"),
    "link_null": ({6}, set(), "10 is Linux's AF_INET6"),
}
UNSUPPORTED = (
    "ppp", "ppp_hdlc", "ppp_direction", "chdlc", "frame_relay", "wlan", "radiotap", "token_ring",
    "fddi", "atm", "nflog",
)  # fmt: skip
QUICK = (
    "wrong_headers", "tunnels", "extensions", "fragments", "link_sll2", "link_ppp",
    "blocks_little", "sections", "cut_packet",
)  # fmt: skip
FILES = dict(odd_files())


def of_tshark(path: Path) -> set[int]:
    fields = ["-T", "fields", "-e", "frame.number", "-e", "tcp.srcport"]
    done = run("tshark", "-n", "-r", path, *fields)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    return {int(row[0]) for row in rows if row[1]}


def of_capinfos(path: Path) -> int | None:
    """The packets of the file; None where capinfos does not read all of it."""
    done = run("capinfos", "-c", "-M", path)
    counts = [line for line in done.stdout.splitlines() if line.startswith("Number of packets")]
    return int(counts[0].split(":")[1]) if counts and not done.returncode else None


def ours(path: Path, folder: Path) -> set[int]:
    """Numbers of the packets that are TCP."""
    plan = planned(find_captures([path]), folder=folder)
    found: set[int] = set()
    for split in plan.splits:
        rows, joined = scan(split, plan.sources()).batch.segments, split.fragments
        alone = rows["packet"][rows["marks"] & FRAGMENT_PART == 0].tolist()
        parts = set() if joined is None else {*joined.batch.segments["packet"]}
        found |= {number for number in alone if number not in parts}
        if joined is not None:
            found |= set(joined.completed[:, 1].tolist())
    return found


@cases("name", QUICK, heavy=sorted(set(FILES) - set(QUICK)))
def test_packets_are_those_of_tshark(name: str, tmp_path: Path) -> None:
    """kdissect and tshark read the same packets of an odd file."""
    data = FILES[name]
    path = tmp_path / ("odd.pcapng" if data[:4] == b"\n\r\r\n" else "odd.pcap")
    path.write_bytes(data)
    tables = kdissect.read(path)
    (capture,) = tables.captures.to_pylist()
    assert capture["packet_count"] == (
        capture["tcp_packet_count"] + sum(dict(capture["ignored_reasons"]).values())
    )
    segments = tables.connections.to_pandas()
    assert capture["tcp_packet_count"] == capture["duplicate_packet_count"] + sum(
        int(segments[f"{side}_segment_count"].sum()) for side in ("request", "response")
    )
    assert tables.exchanges.num_rows == 0
    numbers = ours(path, tmp_path)
    assert len(numbers) == capture["tcp_packet_count"]
    count, theirs = of_capinfos(path), of_tshark(path)
    if count is not None:
        assert capture["packet_count"] == count
    elif capture["error"] is None:
        return  # tshark stops where we go on
    if name.removeprefix("link_") in UNSUPPORTED:
        assert not numbers
        (reason,) = dict(capture["ignored_reasons"])
        assert reason.startswith("unsupported_link_type_")
    elif name == "noise":
        assert len(numbers ^ theirs) < 0.05 * count
    else:
        more, fewer, _ = KNOWN.get(name, (set(), set(), ""))
        assert (numbers - theirs, theirs - numbers) == (more, fewer)
