"""Finished exchanges to rows of `exchanges`, and to what else is shown of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.kafka.assembly import Assembly
from kdissect.pipeline import exchange_index
from kdissect.pipeline.decoder import Decoder, _Chunk
from kdissect.pipeline.facts import CaptureFacts, learn_topics
from kdissect.pipeline.frame_buffer import FrameBuffer
from kdissect.pipeline.options import Options
from kdissect.pipeline.response_versions import infer
from kdissect.protocol import catalog
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.resume.carry import CompletedExchanges
from kdissect.show.filters import Filters
from kdissect.stories.events import Collector
from kdissect.tables.message_facts import ChunkMarks, message_marks

TOPICS_MAX = 100_000  # topic ids that are remembered; the ones told first are forgotten
DETAIL_ROWS = 512  # exchanges whose bytes are at hand together


@dataclass(frozen=True, slots=True)
class Listed:
    """Some exchanges in the order in which they were completed.

    table: rows of `exchanges`. frames: their bytes, in the order of the rows, where asked for.
    tables: all tables that their messages make, of exchanges that the filters hold back too.
    """

    table: pa.Table
    frames: FrameBuffer | None
    tables: dict[str, pa.Table]


class Lister:
    """Lists what is finished; remembers the names of topics that were told so far."""

    def __init__(
        self, options: Options, capture_ids: list[int], filters: Filters, detail: str = ""
    ) -> None:
        """detail: "" for rows alone, "frames" with bytes, "records" with records too."""
        self.options, self.capture_ids, self.filters = options, capture_ids, filters
        self.detail = detail
        self.facts = CaptureFacts()
        self.names: OrderedDict[str, str] = OrderedDict(CaptureFacts().names_by_id())

    def listed(self, finished: CompletedExchanges) -> Iterator[Listed]:
        """The exchanges that the filters let through."""
        assembly = exchange_index.take(finished.assembly, finished.rows)
        sources = finished.sources
        if len(assembly.carried.data):
            sources = sources.carrying(assembly.carried.data)
        infer(assembly, sources)
        self._learn(assembly, sources)
        rows = self.filters.of_index(assembly)
        if not len(rows):
            return
        rows = rows[_by_completion(assembly.exchanges[rows])]
        decoder = _RowDecoder(sources, self.capture_ids, self.options, self.names)
        if self.detail != "records":
            decoder.only_exchanges = True
        step = DETAIL_ROWS if self.detail else len(rows)
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            tables = decoder.tables(assembly, some)
            table = tables["exchanges"]
            kept = self.filters.of_table(table)
            if kept is not None:
                table, some = table.take(pa.array(kept)), some[kept]
            if not len(some):
                continue
            frames = FrameBuffer.gather(assembly, sources, some) if self.detail else None
            yield Listed(table, frames, tables)

    def _learn(self, assembly: Assembly, sources: Any) -> None:
        told = learn_topics(assembly, sources, self.options.chunk_bytes)
        if told.topics:
            for ident, name in told.names_by_id().items():
                self.names.setdefault(ident, name)
            while len(self.names) > TOPICS_MAX:
                self.names.popitem(last=False)


def _by_completion(exchanges: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """The order of the last bytes; where there is no response, of the request's."""
    request, response = exchanges["request"], exchanges["response"]
    time = np.where(response["size"] >= 0, response["end_time_ns"], request["end_time_ns"])
    return np.lexsort((exchanges["exchange_id"], time))


class _RowDecoder(Decoder):
    """A decoder whose rows come in the order given, and which may stop at `exchanges`."""

    def __init__(
        self, sources: Any, capture_ids: list[int], options: Options, names: dict[str, str]
    ) -> None:
        self._found: dict[str, list[pa.Table]] = {}
        super().__init__(sources, capture_ids, CaptureFacts(), options, self._keep, Collector(1))
        self.names_by_id = names
        self.only_exchanges = False

    def _keep(self, name: str, table: pa.Table) -> None:
        self._found.setdefault(name, []).append(table)

    def tables(self, assembly: Assembly, rows: npt.NDArray[np.int64]) -> dict[str, pa.Table]:
        """The tables of some exchanges; `exchanges` in their order."""
        self._found = {}
        self._rows = rows
        self.run(assembly)
        return {
            name: pa.concat_tables(parts, promote_options="permissive").unify_dictionaries()
            for name, parts in self._found.items()
        }

    def _chunks(self, exchanges: npt.NDArray[np.void]) -> Iterator[npt.NDArray[np.int64]]:
        sizes = np.zeros(len(self._rows), np.int64)
        for side in exchange_index.SIDES:
            column = exchanges[side][self._rows]
            sizes += np.where(column["is_whole"] != 0, column["size"], 64)
        number = (np.cumsum(sizes) - sizes) // self.options.chunk_bytes
        yield from np.split(self._rows, np.flatnonzero(np.diff(number)) + 1)

    def _chunk(self, rows: npt.NDArray[np.int64]) -> None:
        if not self.only_exchanges:
            super()._chunk(rows)
            return
        frames = FrameBuffer.gather(self.assembly, self.sources, rows)
        chunk = _Chunk(frames, *self._initial_status(frames))
        for api_key in np.unique(frames.exchanges["api_key"]).tolist():
            if api_key in catalog.apis():
                for side in (REQUEST, RESPONSE):
                    self._decode_side(chunk, api_key, side)
        parts = [
            message_marks(decoded.rows, side, decoded.columns.marks)
            for (_, side), decoded in chunk.decoded.items()
        ]
        marks = ChunkMarks(parts, frames.buf, len(rows), self.names_by_id)
        self._write_exchanges(chunk, marks, self._client_ids(frames))
