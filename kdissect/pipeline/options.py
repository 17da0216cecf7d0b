"""Options of a run, shared by the command line and the Python API, and limits on captured values.

A value beyond its limit becomes an anomaly (docs/limits.md); it is never ignored or fatal.
"""

from __future__ import annotations

import difflib
import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypedDict, get_args

from kdissect.capture.splits import FRAGMENT_MAX
from kdissect.codec import compression, telemetry
from kdissect.codec.message_columns import ELEMENTS_MAX
from kdissect.kafka.options import CONNECTIONS_MAX, FRAME_SIZE_MAX, StreamOptions
from kdissect.pipeline.filters import Time, host_bytes, time_ns

MB = 1 << 20
PathLike = str | os.PathLike[str]
Payload = Literal["full", "keys", "hash", "none"]
DecodeValues = Literal["string", "json", "schema-registry-id"]
PartitionBy = Literal["day"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a run, all positive.

    frame_size: bytes that a size prefix may claim (Kafka's socket.request.max.bytes).
    decompressed_size: bytes of the unpacked records of a batch.
    decompression_ratio: unpacked size as a multiple of the compressed size.
    record_headers: headers of one record.
    array_elements: elements of all arrays of a message together, and its unknown tagged fields.
    nesting: depth of nested values in pushed metrics.
    connections: pairs of endpoints that are assembled together.
    fragments: IP fragments joined, over all captures.
    anomaly_data: bytes of a fault that `anomalies.data` shows.
    """

    frame_size: int = FRAME_SIZE_MAX
    decompressed_size: int = compression.DecompressionLimits().decompressed_size_max
    decompression_ratio: int = compression.DecompressionLimits().ratio_max
    record_headers: int = compression.DecompressionLimits().record_headers_max
    array_elements: int = ELEMENTS_MAX
    nesting: int = telemetry.DEPTH_MAX
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


class ReadOptions(TypedDict, total=False):
    """Options of `kdissect.read` that other functions take by the same names."""

    ports: int | Sequence[int]
    reveal_secrets: bool
    payload: Payload
    decode_values: DecodeValues | None
    keylog: PathLike | Sequence[PathLike]
    hosts: str | Sequence[str]
    from_: Time | None
    until: Time | None
    limits: Limits | Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a dissection.

    ports: TCP ports on which to expect Kafka; detection still looks at the bytes.
    reveal_secrets: show passwords, tokens and sensitive configuration values.
    split_bytes: bytes of captures per task; None chooses from the size of the input.
    payload: how much of the records' keys and values to show (kdissect/tables/payload.py).
    decode_values: adds columns to `records`, as of `kdissect.read`.
    keylog: files with TLS session secrets (SSLKEYLOGFILE); every worker reads them.
    limits: largest values accepted from a capture (kdissect/pipeline/options.py).
    hosts: IP addresses; keep only connections from or to them. Empty: all.
    partition_by: "day" for a folder date=YYYY-MM-DD per day in the tables of exchanges.
    time_from_ns, time_to_ns: ns since 1970; keep only exchanges that begin in this range.
    """

    ports: tuple[int, ...] = ()
    reveal_secrets: bool = False
    split_bytes: int | None = None
    payload: Payload = "full"
    decode_values: DecodeValues | None = None
    keylog: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    hosts: tuple[str, ...] = ()
    time_from_ns: int | None = None
    time_to_ns: int | None = None
    partition_by: PartitionBy | None = None

    @classmethod
    def of(
        cls,
        *,
        ports: int | Sequence[int] = (),
        keylog: PathLike | Sequence[PathLike] = (),
        hosts: str | Sequence[str] = (),
        from_: Time | None = None,
        until: Time | None = None,
        limits: Limits | Mapping[str, int] | None = None,
        **others: Any,
    ) -> Options:
        """The options as users of the API give them. Raises ValueError if one is wrong."""
        return cls(
            ports=_ports(ports),
            keylog=tuple(paths_of(keylog)),
            hosts=(hosts,) if isinstance(hosts, str) else tuple(hosts),
            time_from_ns=None if from_ is None else time_ns(from_),
            time_to_ns=None if until is None else time_ns(until),
            limits=Limits.of(limits),
            **others,
        )

    def __post_init__(self) -> None:
        if self.split_bytes is not None and self.split_bytes < 1:
            raise ValueError("split_bytes must be at least 1")
        for name, choices, is_optional in (
            ("payload", Payload, False),
            ("decode_values", DecodeValues, True),
            ("partition_by", PartitionBy, True),
        ):
            value, known = getattr(self, name), get_args(choices)
            if value not in known and not (is_optional and value is None):
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        for port in self.ports:
            if not 0 < port < 65536:
                raise ValueError(f"ports: {port} is no TCP port")

        for host in self.hosts:
            host_bytes(host)
        first, last = self.time_from_ns, self.time_to_ns
        if first is not None and last is not None and first >= last:
            raise ValueError("the range of times is empty: its end is not after its start")

    @property
    def stream_options(self) -> StreamOptions:
        """The options that reassembly and framing use."""
        return StreamOptions(self.ports, self.limits.frame_size)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # lists for tuples
        return document


def paths_of(paths: PathLike | Sequence[PathLike]) -> list[str]:
    """One path or several as a list."""
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    return [os.fspath(path) for path in several]


def _ports(given: int | Sequence[int]) -> tuple[int, ...]:
    """One port or several as a tuple. Raises ValueError if `given` is no number."""
    several = (given,) if isinstance(given, int | str) else given
    try:
        return tuple(operator.index(port) for port in several)
    except TypeError:
        raise ValueError(f"ports: {given!r} is no number of a TCP port, nor several") from None
