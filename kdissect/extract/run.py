"""Extracts packets in two passes: the first finds the exchanges, the second copies their
packets."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from kdissect import __version__
from kdissect.arrays import Ids, Indices
from kdissect.atomic_file import atomic_write
from kdissect.capture.inputs import find_captures
from kdissect.capture.packet_builder import LINK_TYPE_RAW
from kdissect.capture.pcapng import PcapngWriter
from kdissect.capture.splits import pick
from kdissect.errors import CaptureError, OutputError
from kdissect.extract.packet_search import connection_segments, frame_segments
from kdissect.extract.rewrite import Conversation, Rewriter
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline import local
from kdissect.pipeline.options import Options, PathLike
from kdissect.pipeline.plan import RunPlan, planned
from kdissect.pipeline.selection import Selection
from kdissect.step_log import logged_step
from kdissect.tables.arrow_arrays import plain
from kdissect.tables.connections import endpoint_columns
from kdissect.tables.schemas import FIXED_TABLES
from kdissect.tls.key_log import lines_of

_APPLICATION = f"kdissect {__version__}"
# of `exchanges`: what comments say
_COLUMNS = (
    "exchange_id", "connection_id", "client_ip", "client_port", "broker_ip", "broker_port",
    "api_name", "api_version", "correlation_id", "client_id", "request_capture_id",
    "response_capture_id", "request_packet", "response_packet", "latency_ms", "status",
    "decode_status", "error_name", "topics", "group_id", "transactional_id",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Extracted:
    """Counts of what an extracted file has.

    left_out_frames: those that kdissect could not decode, so it could not replace names in them.
    """

    path: str
    packets: int
    exchanges: int
    connections: int
    secrets_bytes: int = 0
    left_out_frames: int = 0


@dataclass(slots=True)
class _Chosen:
    """A sink of the pipeline: rows of `exchanges` and `connections` that are selected."""

    selection: Selection
    exchanges: list[pa.Table] = field(default_factory=list)
    connections: list[pa.Table] = field(default_factory=list)

    def __call__(self, name: str, table: pa.Table) -> None:
        if name == "exchanges":
            wanted = plain(table, FIXED_TABLES[name])
            rows = self.selection.of_table(wanted)
            kept = wanted if rows is None else wanted.take(pa.array(rows))
            self.exchanges.append(kept.select(list(_COLUMNS)))
        elif name == "connections":
            columns = ["connection_id", "client_ip", "client_port", "broker_ip", "broker_port"]
            wanted = plain(table, FIXED_TABLES[name]).select([*columns, "is_tls", "protocol"])
            self.connections.append(wanted.filter(self.selection.of_connections(wanted)))


Comments = dict[tuple[int, int], list[str]]
"""By source and packet number."""


def extract(
    paths: Sequence[PathLike],
    out: PathLike,
    selection: Selection,
    options: Options,
    *,
    anonymize: bool = False,
    overwrite: bool = False,
    spool: str | None = None,
) -> Extracted:
    """Write the packets of the selected exchanges or connections to the pcapng file `out`.

    An exchange gives the packets with a byte of its frames, retransmitted copies included. A
    connection gives all of its packets, handshake too. An exchange inside TLS gives its whole
    connection, since its records cannot be decrypted without those before. The secrets of its TLS
    sessions that were given or captured are written too. The first packet of each request and
    response gets a comment. With `anonymize` the conversations are written in new packets with
    other names (`anonymize`, `rewrite`).

    Raises CaptureError if a named exchange or connection is not in the captures, OutputError if
    `out` exists and `overwrite` is false.
    """
    target = Path(out)
    if target.is_file() and not overwrite:
        raise OutputError(f"{target}: is there already; --overwrite replaces it")
    with planned(find_captures(paths), options, spool) as plan:
        chosen = _Chosen(selection)
        local.run(plan, chosen)
        exchanges = _joined(chosen.exchanges)
        connections = _joined(chosen.connections)
        _check_named(selection, exchanges, connections, paths)
        if selection.is_of_connections:
            connection_ids = set(connections["connection_id"].to_pylist())
            exchange_ids = None
        else:
            connection_ids = set(exchanges["connection_id"].to_pylist())
            exchange_ids = np.sort(exchanges["exchange_id"].to_numpy())
        if anonymize:
            return _rewritten(plan, target, connection_ids, exchange_ids)
        wanted, sessions = _wanted(plan, connection_ids, exchange_ids)
        comments = _comments(plan, exchanges, connection_ids)
        lines = lines_of(plan.key_logs, sessions)
        secrets = b"".join(line[0].strip() + b"\n" for line in lines)
        with atomic_write(target) as place, open(place, "wb") as stream:
            writer = PcapngWriter(stream, _APPLICATION, f"packets of {selection}")
            if secrets:
                writer.secrets(secrets)
            with logged_step("write packets") as counts:
                count = counts["packets"] = _write(plan, wanted, comments, writer)
    return Extracted(str(target), count, len(exchanges), len(connection_ids), len(secrets))


def _rewritten(
    plan: RunPlan, target: Path, connection_ids: set[int], exchange_ids: Ids | None
) -> Extracted:
    conversations = list(_conversations(plan, connection_ids, exchange_ids))
    rewriter = Rewriter()
    packets = 0
    made = "names, addresses, keys and values are replaced"
    with atomic_write(target) as place, open(place, "wb") as stream:
        writer = PcapngWriter(stream, _APPLICATION, made)
        for time_ns, data, comment in rewriter.packets(conversations):
            writer.packet(LINK_TYPE_RAW, time_ns, data, len(data), comment)
            packets += 1
    return Extracted(
        str(target),
        packets,
        exchanges=sum(len(conversation.rows) for conversation in conversations),
        connections=len(connection_ids),
        left_out_frames=rewriter.left_out,
    )


def _joined(parts: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(parts) if parts else pa.table({"connection_id": [], "exchange_id": []})


def _check_named(
    selection: Selection, exchanges: pa.Table, connections: pa.Table, paths: Sequence[PathLike]
) -> None:
    """Raise CaptureError for an id that was named but does not occur."""
    names = ", ".join(os.fspath(path) for path in paths)
    missing = set(selection.exchanges) - set(exchanges["exchange_id"].to_pylist())
    if missing:
        raise CaptureError(f"{names}: no exchange {min(missing)} among the selected ones")
    for name in selection.connections:
        if not Selection(connections=(name,)).of_connections(connections).any():
            raise CaptureError(f"{names}: no connection {name} among the selected ones")


def _wanted(
    plan: RunPlan, connection_ids: set[int], exchange_ids: Ids | None
) -> tuple[dict[int, Indices], set[bytes]]:
    """Return the packet numbers, by source, of the exchanges (int64[n], sorted), or of whole
    connections if that is None; and the names of the TLS sessions in a key log."""
    wanted: dict[int, list[Indices]] = defaultdict(list)
    sessions: set[bytes] = set()
    for batch, assembly, _ in local.assemblies(plan):
        ids = assembly.connections["connection_id"].tolist()
        for connection in [row for row, name in enumerate(ids) if name in connection_ids]:
            rows = connection_segments(batch, assembly, connection)
            if connection in assembly.tls:
                sessions |= assembly.tls[connection].secret_names
            if exchange_ids is not None and not assembly.connections["is_tls"][connection]:
                own = _own_exchanges(assembly, connection, exchange_ids)
                rows = frame_segments(batch, assembly, connection, own)
            segments = batch.segments[rows]
            for source in np.unique(segments["source"]).tolist():
                wanted[source].append(segments["packet"][segments["source"] == source])
    packets = {source: np.unique(np.concatenate(parts)) for source, parts in wanted.items()}
    return packets, sessions


def _own_exchanges(assembly: Assembly, connection: int, exchange_ids: Ids | None) -> Indices:
    """Return int64[n]: rows of a connection's exchanges, only of the named ones unless that is
    None."""
    own = np.flatnonzero(assembly.exchanges["connection"] == connection)
    if exchange_ids is None:
        return own
    return own[np.isin(assembly.exchanges["exchange_id"][own], exchange_ids)]


def _conversations(
    plan: RunPlan, connection_ids: set[int], exchange_ids: Ids | None
) -> Iterator[Conversation]:
    """Yield the chosen connections with their exchanges; connections without Kafka have none."""
    for _, assembly, sources in local.assemblies(plan):
        ids = assembly.connections["connection_id"].tolist()
        where = endpoint_columns(assembly.endpoints, assembly.connections)
        client_ips, broker_ips = where.client_ip.to_pylist(), where.broker_ip.to_pylist()
        for connection in [row for row, name in enumerate(ids) if name in connection_ids]:
            yield Conversation(
                assembly,
                sources,
                connection,
                _own_exchanges(assembly, connection, exchange_ids),
                (client_ips[connection], int(where.client_port[connection])),
                (broker_ips[connection], int(where.broker_port[connection])),
            )


def _comments(plan: RunPlan, exchanges: pa.Table, connection_ids: set[int]) -> Comments:
    """Return a comment for the first packet of each frame."""
    comments: Comments = defaultdict(list)
    source_of = {name: number for number, name in enumerate(plan.capture_ids)}
    for row in exchanges.to_pylist() if len(exchanges) else ():
        if row["connection_id"] not in connection_ids:
            continue
        version = "" if row["api_version"] is None else f" v{row['api_version']}"
        api = f"{row['api_name'] or 'unknown API'}{version}"
        tail = f"correlation id {row['correlation_id']}, exchange {row['exchange_id']}"
        if row["request_packet"] is not None:
            client = f" from {row['client_id']}" if row["client_id"] else ""
            topics = f", topics {', '.join(row['topics'])}" if row["topics"] else ""
            group = f", group {row['group_id']}" if row["group_id"] else ""
            text = f"{api} request{client}{topics}{group}, {tail}"
            if row["status"] != "paired":
                text += f", {row['status'].replace('_', ' ')}"
            key = (source_of[row["request_capture_id"]], row["request_packet"])
            comments[key].append(text)
        if row["response_packet"] is not None:
            latency = row["latency_ms"]
            after = "" if latency is None else f" after {latency:.3f} ms"
            error = row["error_name"]
            failure = f", {error}" if error and error != "NONE" else ""
            key = (source_of[row["response_capture_id"]], row["response_packet"])
            comments[key].append(f"{api} response{after}{failure}, {tail}")
    return comments


def _write(
    plan: RunPlan, wanted: dict[int, Indices], comments: Comments, writer: PcapngWriter
) -> int:
    """Copy the packets, capture by capture in the order of their times; return their number."""
    sources = plan.sources()
    count = 0
    for split in plan.splits:
        if split.source not in wanted:
            continue
        data = sources.data(split.source)
        picked = pick(split, sources, wanted[split.source])
        for packet, link_type in zip(*picked, strict=True):
            pos, captured = int(packet["data_pos"]), int(packet["captured"])
            writer.packet(
                int(link_type),
                int(packet["time_ns"]),
                data[pos : pos + captured].tobytes(),
                int(packet["length"]),
                "\n".join(comments.get((split.source, int(packet["number"])), [])),
            )
            count += 1
    return count
