"""Limits on values found in a capture, by name, with their defaults.

A value beyond its limit becomes an anomaly (docs/limits.md); it is never ignored or fatal.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields

from kdissect.capture.splits import FRAGMENT_MAX
from kdissect.codec import compression, telemetry
from kdissect.codec.message_columns import ELEMENTS_MAX
from kdissect.kafka.options import CONNECTIONS_MAX, FRAME_SIZE_MAX, GAPS_MAX


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a run, all positive.

    frame_size: bytes that a size prefix may claim (Kafka's socket.request.max.bytes).
    decompressed_size: bytes of the unpacked records of a batch.
    decompression_ratio: unpacked size as a multiple of the compressed size.
    record_headers: headers of one record.
    array_elements: elements of all arrays of a message together.
    nesting: depth of nested values in pushed metrics.
    gaps: gaps listed one by one, for each direction of a connection.
    connections: connections followed at once.
    fragments: IP fragments joined, over all captures.
    anomaly_data: bytes of a fault that `anomalies.data` shows.
    """

    frame_size: int = FRAME_SIZE_MAX
    decompressed_size: int = compression.DecompressionLimits().decompressed_size_max
    decompression_ratio: int = compression.DecompressionLimits().ratio_max
    record_headers: int = compression.DecompressionLimits().record_headers_max
    array_elements: int = ELEMENTS_MAX
    nesting: int = telemetry.DEPTH_MAX
    gaps: int = GAPS_MAX
    connections: int = CONNECTIONS_MAX
    fragments: int = FRAGMENT_MAX
    anomaly_data: int = 4096

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"limit {name}: {value!r} is no positive number")
            most = _MOST.get(name)
            if most is not None and value > most:
                raise ValueError(f"limit {name}: {value} is more than {most}")

    @staticmethod
    def names() -> list[str]:
        return [field.name for field in fields(Limits)]

    @staticmethod
    def of(given: Limits | Mapping[str, int] | None) -> Limits:
        """The defaults with the given values replaced. Raises ValueError for a wrong name or
        value."""
        if given is None:
            return Limits()
        if isinstance(given, Limits):
            return given
        for name in given:
            if name not in Limits.names():
                near = difflib.get_close_matches(name, Limits.names(), 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"no limit {name!r}, there are {', '.join(Limits.names())}{hint}")
        return Limits(**given)

    @staticmethod
    def parse(items: Iterable[str]) -> Limits:
        """Limits from texts NAME=VALUE. Raises ValueError if one cannot be parsed."""
        given = {}
        for item in items:
            name, equals, text = item.partition("=")
            if not equals:
                raise ValueError(f"{item!r} is not NAME=VALUE")
            try:
                given[name.strip().replace("-", "_")] = int(text)
            except ValueError:
                raise ValueError(f"limit {name}: {text!r} is no positive number") from None
        return Limits.of(given)

    @property
    def of_records(self) -> compression.DecompressionLimits:
        return compression.DecompressionLimits(
            decompressed_size_max=self.decompressed_size,
            ratio_max=self.decompression_ratio,
            record_headers_max=self.record_headers,
        )


# Upper bounds: Kafka's int32 sizes, Arrow's 32-bit offsets, Python's recursion.
_MOST = {
    "frame_size": 2**31 - 1,
    "decompressed_size": 1 << 30,
    "record_headers": 2**31 - 1,
    "nesting": 200,
    "anomaly_data": 1 << 20,
}
