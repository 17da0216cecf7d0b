"""Assembles a batch of segments as one bucket in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SegmentBatch
from kdissect.kafka.assemble import assemble_streams
from kdissect.kafka.assembly import Assembly
from kdissect.kafka.options import StreamOptions


def assemble(
    batch: SegmentBatch,
    sources: Sources,
    options: StreamOptions | None = None,
    key_logs: Sequence[Any] = (),
) -> Assembly:
    return assemble_streams([batch], sources, options or StreamOptions(), key_logs)[0]
