"""Small captures give the segments that are stored beside them.

`first_packets.pcap` is the beginning of a real capture, as tcpdump wrote it; `blocks.pcapng` is
`test_formats.make_pcapng()`. `python -m tests.capture.test_golden` writes what is expected anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdissect.capture.inputs import find_captures
from tests.capture.scanned import ignored_of, read, segments_of

GOLDEN = Path(__file__).parents[1] / "golden" / "capture"


def described(path: Path) -> dict[str, Any]:
    """Everything that is known of a capture, as JSON has it."""
    info, _, results, sources = read(find_captures([path])[0])
    data = sources.data(0)
    rows = []
    for segment in segments_of(results):
        row = segment._asdict()
        a, a_port, b, b_port, network = segment.endpoints
        row["endpoints"] = [a.hex(), a_port, b.hex(), b_port, network]
        row["payload"] = data[segment.pos : segment.pos + segment.captured][:16].tobytes().hex()
        rows.append(list(row.values()))
    return {
        "packet_count": info.packet_count,
        "byte_count": info.byte_count,
        "link_types": list(info.link_types),
        "first_time_ns": info.first_time_ns,
        "last_time_ns": info.last_time_ns,
        "error": info.error,
        "ignored_reasons": ignored_of(results),
        "segments": rows,
    }


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.pcap*")), ids=lambda path: path.name)
def test_golden_capture_has_its_stored_segments(path: Path) -> None:
    """A stored capture gives the segments in the JSON file beside it."""
    assert described(path) == json.loads(path.with_suffix(".json").read_text())


if __name__ == "__main__":
    for made in GOLDEN.glob("*.pcap*"):
        told = described(made)
        lines = ",\n".join(json.dumps(row) for row in told.pop("segments"))
        head = json.dumps(told, indent=1)[:-2]
        made.with_suffix(".json").write_text(f'{head},\n "segments": [\n{lines}\n]}}\n')
