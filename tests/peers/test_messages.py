"""Independent decoders, kio and kafka-python, read the same values from real messages.

The messages are those of the captures that ship with the project, a few of each API, version and
side. Where a peer does not know the API or the version there is nothing to compare; the counts
of what was compared are printed, and must not be small.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import importlib
import re
from collections import Counter
from functools import cache
from typing import Any
from uuid import UUID

import kafka.protocol
import numpy as np
import pytest
from kafka.protocol.api_message import ApiMessage
from kio.serial import entity_reader

from kdissect import decode_message
from kdissect.capture.scan import scan
from kdissect.capture.segments import SegmentBatch
from kdissect.kafka.assemble import assemble
from kdissect.pipeline.frame_buffer import FrameBuffer
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import planned
from kdissect.protocol import catalog
from kdissect.protocol.model import SIDES
from tests.conftest import CAPTURES

pytestmark = pytest.mark.peer

SAMPLES_EACH = 3
# -2^31 stands for "not asked" in authorized operations
NO_VALUE = (None, UUID(int=0), -(2**31))
Sample = tuple[int, int, str, bytes]  # api key, api_version, side, frame


@cache
def samples() -> list[Sample]:
    """A few whole frames of each (API, version, side) in the shipped captures."""
    found: list[Sample] = []
    met: Counter[tuple[int, int, str]] = Counter()
    with planned(
        [CAPTURES / "librdkafka.pcap", CAPTURES / "java_2_0_1.pcap"], Options(), 1
    ) as plan:
        sources = plan.sources()
        batches = [scan(split, sources).batch for split in plan.splits]
        assembly = assemble(SegmentBatch.concat(batches), sources)
        frames = FrameBuffer.gather(assembly, sources, np.arange(len(assembly.exchanges)))
        for side, name in enumerate(SIDES):
            for row in np.flatnonzero(frames.whole(side) & frames.known(side)).tolist():
                version = int(frames.versions(side)[row])
                kind = (int(frames.exchanges["api_key"][row]), version, name)
                met[kind] += 1
                if met[kind] <= SAMPLES_EACH:
                    start, end = int(frames.start[row, side]), int(frames.end[row, side])
                    found.append((*kind, frames.buf[start:end].tobytes()))
    return found


def body_of(sample: Sample) -> tuple[dict[str, Any], bytes]:
    """kdissect's values, and the bytes after the header."""
    key, version, side, frame = sample
    message = decode_message(frame, side=side, api_key=key, api_version=version)
    api = catalog.api(key)
    if side == "request":
        client_id = message.header["client_id"] or ""
        size = 10 + len(client_id.encode()) + (api.request_header_version(version) == 2)
    else:
        size = 4 + (api.response_header_version(version) == 1)
    return message.body, frame[size:]


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


# -- kio ------------------------------------------------------------------------------------


def kio_entity(key: int, version: int, side: str) -> Any:
    name = catalog.api(key).name
    try:
        module = importlib.import_module(f"kio.schema.{snake(name)}.v{version}.{side}")
    except ModuleNotFoundError:
        return None
    return getattr(module, f"{name}{side.capitalize()}", None)


def kio_plain(value: Any) -> Any:
    """kio's values in our conventions."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: kio_plain(inner) for name, inner in fields.items()}
    if isinstance(value, tuple | list):
        return [kio_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime.timedelta):
        return round(value.total_seconds() * 1000)
    if isinstance(value, datetime.datetime):
        return round(value.timestamp() * 1000)
    return value


def assert_kio(ours: Any, theirs: Any, path: str) -> None:
    """Equal, but for kio's own ways with names (`_ms` dropped, `id_`) and with null."""
    if isinstance(ours, dict):
        for name, value in ours.items():
            if name == "_unknown_tags":
                continue
            names = (name, name.removesuffix("_ms"), f"{name}_")
            known = [candidate for candidate in names if candidate in theirs]
            assert known, f"{path}.{name} is not in {sorted(theirs)}"
            assert_kio(value, theirs[known[0]], f"{path}.{name}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs or []), path
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_kio(mine, other, f"{path}[{index}]")
    elif theirs is None:
        # the zero uuid and times of -1 are None there
        assert ours in (None, -1, UUID(int=0)), path
    else:
        assert ours == theirs, path


def test_kio_reads_the_same() -> None:
    """Every sample that kio knows has the same values there."""
    compared: Counter[tuple[int, int, str]] = Counter()
    for sample in samples():
        key, version, side, _ = sample
        entity = kio_entity(key, version, side)
        if entity is None:
            continue
        ours, body = body_of(sample)
        theirs, _ = entity_reader(entity)(body, 0)
        assert_kio(ours, kio_plain(theirs), f"{catalog.api(key).name} v{version} {side}")
        compared[key, version, side] += 1
    print(f"kio: {compared.total()} messages of {len(compared)} (API, version, side)")
    assert len(compared) > 90


# -- kafka-python -----------------------------------------------------------------------------


@cache
def kafka_python_classes() -> dict[str, type[ApiMessage]]:
    found = {}
    for package in ("admin", "consumer", "metadata", "producer", "sasl"):
        module = importlib.import_module(f"{kafka.protocol.__name__}.{package}")
        for name in dir(module):
            item = getattr(module, name)
            if isinstance(item, type) and issubclass(item, ApiMessage):
                found[name] = item
    return found


def assert_kafka_python(ours: Any, theirs: Any, path: str) -> None:
    """Equal as far as the peer names the same fields; names of older releases are passed over."""
    if isinstance(ours, dict):
        if theirs is None:
            return  # an absent tagged struct, which has defaults here and is None there
        shared = [name for name in ours if hasattr(theirs, name)]
        assert shared or not ours, f"{path}: no field in common"
        for name in shared:
            assert_kafka_python(ours[name], getattr(theirs, name), f"{path}.{name}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs or []), path
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_kafka_python(mine, other, f"{path}[{index}]")
    elif isinstance(theirs, set | frozenset | dict):
        return  # bit fields are taken apart there
    else:
        assert ours == theirs or (ours in NO_VALUE and not theirs), path


def test_kafka_python_reads_the_same() -> None:
    """Every sample that kafka-python knows has the same values there."""
    compared: Counter[tuple[int, int, str]] = Counter()
    for sample in samples():
        key, version, side, _ = sample
        known = kafka_python_classes().get(f"{catalog.api(key).name}{side.capitalize()}")
        if known is None or not known.min_version <= version <= known.max_version:
            continue
        ours, body = body_of(sample)
        theirs = known.decode(body, version=version)
        assert_kafka_python(ours, theirs, f"{catalog.api(key).name} v{version} {side}")
        compared[key, version, side] += 1
    print(f"kafka-python: {compared.total()} messages of {len(compared)} (API, version, side)")
    assert len(compared) > 60
