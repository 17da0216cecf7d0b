"""Turns captures into rows of `exchanges`, and into their details for `show`."""

from __future__ import annotations

import signal
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from kdissect.arrays import Indices, Rows
from kdissect.capture.mapped_files import Sources
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.decode import decoded_chunks, write_chunks
from kdissect.pipeline.learn import learn_topics
from kdissect.pipeline.message_tables import TableOutput
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import capture_id
from kdissect.pipeline.selection import Selection
from kdissect.pipeline.unrequested_responses import infer
from kdissect.resume.carry import CompletedExchanges
from kdissect.show.reading import CaptureReading
from kdissect.step_log import logged_step
from kdissect.stories.events import Collector
from kdissect.tables.connections import tcp_table
from kdissect.tables.exchanges import exchanges_table
from kdissect.tables.message_chunk import FrameBuffer, chunks, frame_sizes
from kdissect.tables.topics import SeenTopics, TopicNames

TOPICS_MAX = 100_000  # topic ids that are remembered; beyond that the oldest are forgotten
DETAIL_ROWS = 512  # exchanges whose bytes are at hand together


@dataclass(frozen=True, slots=True)
class Listed:
    """Some exchanges in the order in which they were completed.

    table: rows of `exchanges`. frames: their bytes, in the order of the rows, where asked for.
    tables: all tables that their messages make, of exchanges that do not pass the selection too.
    connections: with frames, facts of the connections so far: a `tcp_table`.
    """

    table: pa.Table
    frames: FrameBuffer | None
    tables: dict[str, pa.Table]
    connections: pa.Table | None = None


class Exchanges:
    """The exchanges of captures that pass a selection, as they are completed.

    Topic ids have the names seen so far. reading: how far the captures are read. count: exchanges
    that passed so far. is_interrupted: an interrupt ended `batches`.
    """

    def __init__(
        self,
        paths: Sequence[str],
        options: Options,
        selection: Selection,
        note: Callable[[str], None],
        detail: str = "",
    ) -> None:
        """detail: "" for rows alone, "frames" with bytes, "records" with records too."""
        self.reading = CaptureReading(paths, options, note)
        self.count = 0
        self.is_interrupted = False
        self._capture_ids = np.array([capture_id(path) for path in self.reading.paths], np.int64)
        self._options, self._selection, self._note = options, selection, note
        self._detail = detail
        self._names: OrderedDict[str, str] = OrderedDict(SeenTopics().names().of_id)

    def __iter__(self) -> Iterator[Listed]:
        with logged_step("read captures", captures=len(self.reading.paths)) as counts:
            for finished in self.reading:
                for listed in self._listed(finished):
                    self.count += listed.table.num_rows
                    yield listed
            counts["packets"] = self.reading.packet_count
            counts["exchanges"] = self.reading.exchange_count
            counts["shown"] = self.count
        if self.reading.exchange_count and not self.count:
            self._note(f"0 of {self.reading.exchange_count:,} exchanges pass the filters")

    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Their rows with the columns of the schema; an interrupt ends a live capture.

        An interrupt while the caller writes a batch ends the rows after that batch, so that the
        file is whole. To be called in the main thread.
        """
        is_reading = True

        def end(*_: object) -> None:
            self.is_interrupted = True
            if is_reading:
                raise KeyboardInterrupt

        earlier = signal.signal(signal.SIGINT, end)
        try:
            for listed in self:
                for batch in listed.table.select(schema.names).cast(schema).to_batches():
                    is_reading = False
                    yield batch
                    if self.is_interrupted:
                        return
                    is_reading = True
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGINT, earlier)

    def _listed(self, finished: CompletedExchanges) -> Iterator[Listed]:
        assembly, sources = finished.assembly, finished.sources
        infer(assembly, sources)
        self._learn(assembly, sources)
        rows = self._selection.of_index(assembly)
        if not len(rows):
            return
        rows = rows[_by_completion(assembly.exchanges[rows])]
        step = DETAIL_ROWS if self._detail else len(rows)
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            tables = self._tables(assembly, sources, some)
            table = tables["exchanges"]
            kept = self._selection.of_table(table)
            if kept is not None:
                table, some = table.take(pa.array(kept)), some[kept]
            if not len(some):
                continue
            if not self._detail:
                yield Listed(table, None, tables)
                continue
            frames = FrameBuffer.gather(assembly, sources, some)
            connections = _connections(assembly, table["connection_id"])
            yield Listed(table, frames, tables, connections)

    def _tables(self, assembly: Assembly, sources: Sources, rows: Indices) -> dict[str, pa.Table]:
        """The tables of some exchanges; `exchanges` in their order."""
        parts: dict[str, list[pa.Table]] = {}

        def keep(name: str, table: pa.Table) -> None:
            parts.setdefault(name, []).append(table)

        some = chunks(rows, frame_sizes(assembly.exchanges))
        names = TopicNames(self._names, SeenTopics().names().id_of)
        decoded = decoded_chunks(assembly, sources, some, self._capture_ids, names, self._options)
        if self._detail == "records":
            write_chunks(decoded, TableOutput(self._options, keep), Collector(1))
        else:
            for chunk in decoded:
                keep("exchanges", exchanges_table(chunk))
        return {
            name: pa.concat_tables(some, promote_options="permissive").unify_dictionaries()
            for name, some in parts.items()
        }

    def _learn(self, assembly: Assembly, sources: Sources) -> None:
        seen = learn_topics(assembly, sources)
        for ident, name in seen.names().of_id.items():
            self._names.setdefault(ident, name)
        while len(self._names) > TOPICS_MAX:
            self._names.popitem(last=False)
        # the metadata log's id, by which records with credentials are known, always stays
        self._names.update(SeenTopics().names().of_id)


def _connections(assembly: Assembly, connection_ids: pa.ChunkedArray) -> pa.Table:
    """TCP facts of the connections with these ids."""
    all_ids = assembly.connections["connection_id"]
    rows = np.flatnonzero(np.isin(all_ids, connection_ids.to_numpy()))
    return tcp_table(assembly.connections[rows], assembly.tcp.take(rows))


def _by_completion(exchanges: Rows) -> Indices:
    """The order of the last bytes; where there is no response, of the request's."""
    request, response = exchanges["request"], exchanges["response"]
    time = np.where(response["size"] >= 0, response["end_time_ns"], request["end_time_ns"])
    return np.lexsort((exchanges["exchange_id"], time))
