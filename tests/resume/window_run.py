"""A capture read window by window, and the exchanges that each window completes."""

from pathlib import Path

from kdissect.capture.mapped_files import Sources
from kdissect.capture.windows import WindowReader
from kdissect.kafka.assembly import PairStatus
from kdissect.kafka.options import StreamOptions
from kdissect.resume.carry import CarryLimits, CompletedExchanges, ConnectionCarry
from tests.builders.captures import Packet, write_packets


class Run:
    """Windows of one packet or more, and the exchanges that each one finishes."""

    def __init__(self, path: Path, limits: CarryLimits | None = None) -> None:
        self.path = path
        self.resumed = ConnectionCarry(StreamOptions(), limits=limits)
        self.found: list[list[tuple[int, str]]] = []  # per window: (correlation id, status)
        self.sizes: dict[int, set[tuple[int, int]]] = {}  # by id: of request and response
        self.queued_us: dict[int, int] = {}  # by id; -1 unknown

    def packets(self, packets: list[Packet]) -> list[list[tuple[int, str]]]:
        paths = [str(write_packets(self.path, packets))]
        reader = WindowReader(paths[0], 0, paths)
        for window in reader.windows():
            self.found.append(self.rows(self.resumed.add(window.batch, window.sources)))
        finished = self.resumed.finish(Sources(paths))
        self.found.append([row for some in finished for row in self.rows(some)])
        return self.found

    def rows(self, finished: CompletedExchanges) -> list[tuple[int, str]]:
        exchanges = finished.assembly.exchanges
        for row in exchanges:
            both = int(row["request"]["size"]), int(row["response"]["size"])
            self.sizes.setdefault(int(row["correlation_id"]), set()).add(both)
            queued = int(row["queued_ns"])
            self.queued_us[int(row["correlation_id"])] = queued if queued < 0 else queued // 1000
        return [
            (int(row["correlation_id"]), PairStatus(row["status"]).name.lower())
            for row in exchanges
        ]


def flat(found: list[list[tuple[int, str]]]) -> list[tuple[int, str]]:
    return [row for some in found for row in some]
