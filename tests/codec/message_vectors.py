"""The message vectors as frames in one buffer per API and side, with expected values."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections import defaultdict
from functools import cache
from typing import Any
from uuid import UUID

import numpy as np

from tests.material import VECTORS


@cache
def message_vectors() -> dict[tuple[int, str], list[dict[str, Any]]]:
    """All vectors by API key and side."""
    groups = defaultdict(list)
    with gzip.open(VECTORS / "messages.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            vector = json.loads(line)
            vector["frame"] = bytes.fromhex(vector["frame"])
            groups[vector["api_key"], vector["side"]].append(vector)
    return dict(groups)


def batch(frames: list[bytes]) -> tuple[Any, Any, Any]:
    """(buffer, starts, ends) of frames, one after another."""
    end = np.cumsum([len(frame) for frame in frames], dtype=np.int64)
    start = end - np.array([len(frame) for frame in frames], np.int64)
    return np.frombuffer(b"".join(frames), np.uint8), start, end


def uuid_text(value: UUID) -> str:
    return base64.urlsafe_b64encode(value.bytes)[:22].decode()


def same(expected: Any, got: Any, field: Any, where: str = "") -> None:
    """Assert that a column's value is the vector's; fields of other versions are null.

    field: model.Field, or a sequence of them for a struct's.
    """
    if isinstance(field, tuple):
        known = {one.name: one for one in field}
        for name, value in got.items():
            if name == "_present":
                assert value is True, where
            elif name not in expected:
                assert value is None, f"{where}.{name}"
        for name, value in expected.items():
            if name == "_unknown_tags" or known[name].type.value == "records":
                assert name not in got, f"{where}.{name}"
                continue
            same(value, got[name], known[name], f"{where}.{name}")
    elif expected is None:
        assert got is None, where
    elif isinstance(expected, list):
        assert len(expected) == len(got), where
        for at, (one, other) in enumerate(zip(expected, got, strict=True)):
            same(one, other, field.fields if field.fields else field, f"{where}[{at}]")
    elif isinstance(expected, dict) and "$uuid" in expected:
        assert got == uuid_text(UUID(expected["$uuid"])), where
    elif isinstance(expected, dict) and "$bytes" in expected:
        assert got == bytes.fromhex(expected["$bytes"]), where
    elif field.type.value == "struct":
        same(expected, got, field.fields, where)
    elif field.type.value == "float64":
        number = float(expected)
        assert math.isnan(got) if math.isnan(number) else repr(got) == repr(number), where
    else:
        assert type(got) is type(expected), where
        assert got == expected, where


def unknown_tags_of(vector: dict[str, Any]) -> list[tuple[str, int, bytes]]:
    """(path, tag, data) of a vector's unknown tags, header first."""
    found: list[tuple[str, int, bytes]] = []

    def walk(value: Any, path: str) -> None:
        if isinstance(value, list):
            for at, one in enumerate(value):
                walk(one, f"{path}[{at}]")
        elif isinstance(value, dict):
            for name, one in value.items():
                if name == "_unknown_tags":
                    tags = {int(tag): bytes.fromhex(data["$bytes"]) for tag, data in one.items()}
                    found.extend((path, tag, data) for tag, data in tags.items())
                elif not name.startswith("$"):
                    walk(one, f"{path}.{name}".removeprefix("."))

    walk(vector["header"], "header")
    walk(vector["body"], "")
    return found
