"""Captures, one after the other, as the exchanges that their packets finish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kdissect.capture.inputs import InputFile, find_captures
from kdissect.capture.mapped_files import Sources
from kdissect.capture.windows import WindowReader
from kdissect.errors import CaptureError
from kdissect.kafka.assembly import Protocol
from kdissect.kafka.options import CONNECTIONS_MAX
from kdissect.pipeline.options import Options
from kdissect.resume.carry import CarryLimits, CompletedExchanges, ConnectionCarry

NO_TIME_YET = 2**63 - 1  # time of the first segment of a capture without segments


class CaptureReading:
    """The captures that `paths` stand for, ordered by their first segment's time.

    They are read one after the other as one input, so connections may cross files; captures that
    were taken at the same time in several places are not merged by time. `note` is called with a
    line for each thing that the user should know. Raises CaptureError as `find_captures` does.
    """

    def __init__(self, paths: Sequence[str], options: Options, note: Callable[[str], None]) -> None:
        self.note = note
        files = find_captures(paths)
        usable = [item for item in files if item.is_capture or item.format == "stream"]
        others = [item for item in files if item not in usable]
        if len(others) == 1:
            note(f"{others[0].path}: {others[0].error}; skipped")
        elif others:
            note(f"{len(others)} files are no captures and skipped, {others[0].path} among them")
        if not usable:
            raise CaptureError(f"{files[0].path}: {files[0].error}")
        self.paths = [item.path for item in _in_order(usable)]
        limits = CarryLimits()
        if options.limits.connections != CONNECTIONS_MAX:
            limits = CarryLimits(connection_max=options.limits.connections)
        key_logs: list[memoryview] = []
        if options.keylog:  # imported on use only: `show` starts at once
            from kdissect.pipeline.plan import read_key_logs

            key_logs = read_key_logs(options.keylog)
        self.resumed = ConnectionCarry(options.stream_options, key_logs, limits)
        self.packet_count = self.exchange_count = 0
        self.ignored: Counter[str] = Counter()  # packets without TCP, by reason

    @property
    def unread(self) -> dict[str, int]:
        """Connections that were not read, by `protocol` of the table `connections`."""
        return {kind.name.lower(): int(self.resumed.counts.unread[kind]) for kind in Protocol}

    def __iter__(self) -> Iterator[CompletedExchanges]:
        """Yields exchanges as soon as they are complete. Use each result before taking the next:
        its payload stays readable only until then."""
        for source, path in enumerate(self.paths):
            reader = WindowReader(path, source, self.paths)
            for window in reader.windows():
                self.resumed.key_logs += window.secrets
                self.ignored += window.ignored
                found = self.resumed.add(window.batch, window.sources)
                if len(found.assembly.exchanges):
                    self.exchange_count += len(found.assembly.exchanges)
                    yield found
            self.packet_count += reader.packet_count
            if reader.error:
                self.note(f"{path}: {reader.error}")
        for found in self.resumed.finish(Sources(self.paths)):
            self.exchange_count += len(found.assembly.exchanges)
            yield found
        if given_up := self.resumed.counts.given_up:
            self.note(
                f"{given_up} connections were quiet for long and made room for others with "
                "requests still open"
            )


def _in_order(found: list[InputFile]) -> list[InputFile]:
    if len(found) == 1:
        return found
    return sorted(found, key=lambda item: (_first_time_ns(item), item.path))


def _first_time_ns(item: InputFile) -> int:
    """Time of a capture's first segment, ns since 1970.

    NO_TIME_YET if there is none, or if the capture cannot be read twice. Raises CaptureError if it
    cannot be opened.
    """
    if item.format == "stream":
        return NO_TIME_YET
    for window in WindowReader(item.path, 0, [item.path]).windows():
        if len(window.batch.segments):
            return int(window.batch.segments["time_ns"][0])
    return NO_TIME_YET
