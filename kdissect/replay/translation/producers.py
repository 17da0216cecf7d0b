"""Producer ids, epochs and sequences: the capture's and the target's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from kdissect.replay.translation.offsets import Log

_SEQUENCES = 1 << 31  # they wrap to 0


class Producer(NamedTuple):
    """A producer id with its epoch."""

    producer_id: int
    epoch: int


class Producers:
    """Learns from answers who is who; the capture's ids are keys, the target's values."""

    def __init__(self) -> None:
        # captured id -> the target's error, where it refused the InitProducerId that gave it
        self.refused: dict[int, int] = {}
        self._targets: dict[Producer, Producer] = {}
        self._last: dict[int, Producer] = {}  # captured id -> the epoch learnt last
        # captured records of a producer in a partition that the target did not get
        self._lost: Counter[tuple[Producer, Log]] = Counter()

    def learn(self, captured: Producer, target: Producer) -> None:
        if captured.producer_id < 0 or target.producer_id < 0:
            return
        self._targets[captured] = target
        self._last[captured.producer_id] = captured

    @property
    def learnt(self) -> Mapping[Producer, Producer]:
        """Captured producer -> the target's, as answers gave them, in their order."""
        return self._targets

    def target(self, captured: Producer) -> Producer | None:
        """The target's producer id and epoch, or None if they are unknown.

        A client can raise the epoch by itself (KIP-360). An epoch that no answer returned keeps its
        distance to the last epoch that one did.
        """
        if captured.producer_id < 0:
            return captured
        found = self._targets.get(captured)
        if found is not None:
            return found
        last = self._last.get(captured.producer_id)
        if last is None:
            return None
        target = self._targets[last]
        if captured.epoch < 0:
            return Producer(target.producer_id, captured.epoch)
        epoch = target.epoch + captured.epoch - last.epoch
        return Producer(target.producer_id, max(0, min(epoch, 0x7FFF)))

    def target_id(self, captured_id: int) -> int | None:
        """The target's producer id, for messages that have no epoch; None if it is unknown."""
        last = self._last.get(captured_id)
        return None if last is None else self._targets[last].producer_id

    def sequence(self, captured: Producer, log: Log, base_sequence: int) -> int:
        """The target's base sequence of a captured batch."""
        if base_sequence < 0:
            return base_sequence
        return (base_sequence - self._lost[captured, log]) % _SEQUENCES

    def lost(self, captured: Producer, log: Log, record_count: int) -> None:
        """The capture's broker took a batch that the target did not: later ones move up."""
        self._lost[captured, log] += record_count
