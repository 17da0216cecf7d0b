"""Options of a run, shared by the command line and the Python API; picklable."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from kdissect.kafka.options import StreamOptions
from kdissect.pipeline.filters import host_bytes, time_ns
from kdissect.pipeline.limits import Limits
from kdissect.tables.schemas import DECODE_VALUES

MB = 1 << 20
PathLike = str | os.PathLike[str]
Time = str | float | datetime  # a time as users write it, see `time_ns`
PAYLOADS = ("full", "keys", "hash", "none")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a dissection.

    ports: TCP ports on which to expect Kafka; detection still looks at the bytes.
    reveal_secrets: show passwords, tokens and sensitive configuration values.
    split_bytes: bytes of captures per task; None chooses from the size of the input.
    payload: how much of the records' keys and values to show (kdissect/tables/payload.py).
    decode_values: adds columns to `records`, one of DECODE_VALUES.
    keylog: files with TLS session secrets (SSLKEYLOGFILE); every worker reads them.
    limits: largest values accepted from a capture (kdissect/pipeline/limits.py).
    hosts: IP addresses; keep only connections from or to them. Empty: all.
    time_from_ns, time_to_ns: ns since 1970; keep only exchanges that begin in this range.
    chunk_bytes: bytes of frames decoded at a time; fits the caches of a core.
    """

    ports: tuple[int, ...] = ()
    reveal_secrets: bool = False
    split_bytes: int | None = None
    payload: str = "full"
    decode_values: str | None = None
    keylog: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    hosts: tuple[str, ...] = ()
    time_from_ns: int | None = None
    time_to_ns: int | None = None
    chunk_bytes: int = 8 * MB

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
        if self.payload not in PAYLOADS:
            raise ValueError(f"payload must be one of {', '.join(PAYLOADS)}, not {self.payload!r}")
        if self.decode_values is not None and self.decode_values not in DECODE_VALUES:
            raise ValueError(
                f"decode_values must be one of {', '.join(DECODE_VALUES)}, "
                f"not {self.decode_values!r}"
            )
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
        return StreamOptions(self.ports, self.limits.frame_size, self.limits.gaps)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "ports": list(self.ports),
            "keylog": list(self.keylog),
            "hosts": list(self.hosts),
        }


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
