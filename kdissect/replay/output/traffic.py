"""Writes the traffic of a run as a capture: raw IP packets with its requests and responses.

It is written after the run from the outcomes, so it costs the run no time. The payload is
plaintext, also if the run used TLS, and has no SASL exchanges. For --out the usual pipeline
dissects it.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kdissect import api
from kdissect.capture.packet_builder import BROKER, CLIENT, LINK_TYPE_RAW, Flow
from kdissect.replay.running.runner import RunResult

_MAGIC_NS = 0xA1B23C4D


def write_tables(result: RunResult, out: str) -> None:
    """Write a table set of the requests that the replay sent and the target's responses.

    `captures.path` is `replay.pcap`. Raises OutputError if `out` cannot be used.
    """
    ports = sorted({record.theirs[1] for record in result.links})
    with tempfile.TemporaryDirectory(prefix="kdissect-replay-") as folder:
        path = Path(folder, "replay.pcap")
        write_capture(result, path)
        api.read(path, ports=ports).write(out)


def write_capture(result: RunResult, path: Path) -> int:
    """Write a pcap file (nanoseconds); returns the number of packets."""
    flows = [Flow(_end(record.ours), _end(record.theirs)) for record in result.links]
    count = 0
    with open(path, "wb") as file:
        file.write(struct.pack("<IHHiIII", _MAGIC_NS, 2, 4, 0, 0, 1 << 18, LINK_TYPE_RAW))
        for at_ns, link, kind, payload in sorted(_events(result), key=lambda each: each[0]):
            flow, time_ns = flows[link], result.start_time_ns + at_ns
            if kind == "open":
                packets = list(flow.opened())
            elif kind == "close":
                packets = list(flow.closed())
            else:
                side = CLIENT if kind == "sent" else BROKER
                packets = list(flow.sent(side, len(payload).to_bytes(4, "big") + payload))
            for packet in packets:
                _write(file, time_ns, packet)
            count += len(packets)
    return count


def _events(result: RunResult) -> Iterator[tuple[int, int, str, bytes]]:
    """Yield the events of links: (ns since start, link, kind, frame), in order for each link."""
    for number, record in enumerate(result.links):
        yield record.opened_ns, number, "open", b""
    for attempt in result.attempts:
        yield attempt.sent_ns, attempt.link, "sent", attempt.sent
        if attempt.answer:
            yield attempt.answered_ns, attempt.link, "answer", attempt.answer
    for number, record in enumerate(result.links):
        if record.closed_ns >= 0:
            yield record.closed_ns, number, "close", b""


def _end(address: tuple[str, int]) -> tuple[str, int]:
    """Return an endpoint without the zone of a link-local address."""
    return address[0].partition("%")[0], address[1]


def _write(file: BinaryIO, time_ns: int, packet: bytes) -> None:
    seconds, rest = divmod(time_ns, 10**9)
    file.write(struct.pack("<IIII", seconds, rest, len(packet), len(packet)) + packet)
