"""Which bytes of a chunk's frames are record sets, and where in them the first batch begins."""

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
    """(the record sets that hold something, bytes in front of the first batch of each).

    api_key: that of each exchange of the chunk. Pieces of a snapshot from a position behind its
    begin start anywhere; all other sets start with a batch.
    """
    sets = marks.places(Role.RECORDS)
    is_piece = api_key[sets.row] == ApiKey.FETCH_SNAPSHOT
    position = np.zeros(len(sets.row), np.int64)
    if is_piece.any():
        told = marks.places(Role.SNAPSHOT_POSITION)
        # each partition of a response has one position and one set
        position[is_piece] = told.start[told.side == _RESPONSE]
    kept = sets.length > 0
    some = RecordSets(*(_kept(sets, name, kept) for name in RecordSets.__dataclass_fields__))
    lead = np.zeros(len(some.row), np.int64)
    for at in np.flatnonzero(position[kept] != 0).tolist():
        start = int(some.start[at])
        lead[at] = first_batch(buf[start : start + int(some.length[at])])
    return some, lead


def _kept(sets: RecordSets, name: str, kept: npt.NDArray[np.bool_]) -> Any:
    return getattr(sets, name)[kept]
