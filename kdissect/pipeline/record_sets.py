"""Find the record sets in a chunk's frames, and the first batch in each."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.codec.batch_resync import first_batch
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role
from kdissect.tables.message_facts import ChunkMarks, RecordSets

_RESPONSE = 1


def record_sets(
    marks: ChunkMarks, api_key: npt.NDArray[np.int16], buf: npt.NDArray[np.uint8]
) -> tuple[RecordSets, npt.NDArray[np.int64]]:
    """(record sets that are not empty, bytes before the first batch of each).

    api_key: of each exchange of the chunk. FetchSnapshot (KIP-630) sends a snapshot in pieces; a
    piece with a position above 0 may start inside a batch. Other sets start with a batch.
    """
    sets = marks.places(Role.RECORDS)
    is_piece = api_key[sets.row] == ApiKey.FETCH_SNAPSHOT
    position = np.zeros(len(sets.row), np.int64)
    if is_piece.any():
        positions = marks.places(Role.SNAPSHOT_POSITION)
        # a FetchSnapshot response has one position and one record set per partition
        position[is_piece] = positions.start[positions.side == _RESPONSE]
    kept = sets.length > 0
    nonempty = RecordSets(*(_kept(sets, name, kept) for name in RecordSets.__dataclass_fields__))
    lead = np.zeros(len(nonempty.row), np.int64)
    for at in np.flatnonzero(position[kept] != 0).tolist():
        start = int(nonempty.start[at])
        lead[at] = first_batch(buf[start : start + int(nonempty.length[at])])
    return nonempty, lead


def _kept(sets: RecordSets, name: str, kept: npt.NDArray[np.bool_]) -> Any:
    return getattr(sets, name)[kept]
