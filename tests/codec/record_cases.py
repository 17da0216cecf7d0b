"""Record sets read by both decoders, whose rows have to agree."""

from typing import Any

import numpy as np

from kdissect.codec.compression import DecompressionLimits, decompressed
from kdissect.codec.record_batches import iter_record_chunks
from tests.oracles.record_sets import RecordSet, decode_record_set


def decode_columns(
    sets: list[bytes], limits: DecompressionLimits | None = None, chunk_bytes: int = 8 << 20
) -> list[RecordSet]:
    """The kernel's rows of each set, in the shape of the reference's."""
    buf = np.frombuffer(b"".join(sets), np.uint8)
    length = np.array([len(data) for data in sets], np.int64)
    start = np.cumsum(length) - length
    results = [RecordSet() for _ in sets]
    texts: dict[tuple[int, int], list[Any]] = {}
    for chunk in iter_record_chunks(
        buf, start, length, limits or DecompressionLimits(), chunk_bytes
    ):
        chunk.batches.validate(full=True)
        chunk.records.validate(full=True)
        for row in chunk.batches.to_pylist():
            i = row.pop("set_index")
            row["pos"] -= int(start[i])
            results[i].batches.append(row)
        for row in chunk.records.to_pylist():
            results[row.pop("set_index")].records.append(row)
        for i, index, kind, stage, pos, size, keys in chunk.faults.tolist():
            fault = [index, kind, stage, pos - int(start[i]), size, keys]
            if stage != 4:
                results[i].faults.append(tuple(fault))
            elif (i, index) in texts:  # counted per chunk
                texts[i, index][5] += keys
            else:
                texts[i, index] = fault
    for (i, _), fault in texts.items():
        results[i].faults.append(tuple(fault))
    for result in results:
        result.faults.sort(key=lambda fault: (fault[0], fault[2]))
    return results


def assert_twins_agree(
    sets: list[bytes], limits: DecompressionLimits | None = None, chunk_bytes: int = 8 << 20
) -> list[RecordSet]:
    """Kernel and reference give the same rows and faults; returns them."""
    found = decode_columns(sets, limits, chunk_bytes)
    for i, data in enumerate(sets):
        expected = decode_record_set(data, limits or DecompressionLimits(), decompressed)
        assert found[i].batches == expected.batches, data.hex()
        assert found[i].records == expected.records, data.hex()
        assert found[i].faults == expected.faults, data.hex()
        sizes = sum(batch["size"] for batch in expected.batches)
        lost = sum(f[4] for f in expected.faults if f[0] >= len(expected.batches))
        assert sizes + lost == len(data), "every byte is in a batch or under a fault"
    return found
