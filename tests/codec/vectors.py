"""Kafka's vectors: messages, internal records and record sets, with the values that it wrote."""

import base64
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any
from uuid import UUID

import numpy as np

from kdissect.protocol import catalog
from kdissect.protocol.model import Definition
from tests.material import VECTORS

LOGS = {  # kind of vector -> name of its log, and a topic of that log
    "group_coordinator": ("group", "__consumer_offsets"),
    "transaction": ("transaction", "__transaction_state"),
    "share_coordinator": ("share", "__share_group_state"),
    "cluster_metadata": ("metadata", "__cluster_metadata"),
    "control_record": ("control", "orders"),
}
WITH_KEYS = {"group_coordinator", "transaction", "share_coordinator"}


def _lines(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(VECTORS / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


@cache
def message_vectors() -> dict[tuple[int, str], list[dict[str, Any]]]:
    """All messages by API key and side, frames as bytes."""
    groups = defaultdict(list)
    for vector in _lines("messages"):
        vector["frame"] = bytes.fromhex(vector["frame"])
        groups[vector["api_key"], vector["side"]].append(vector)
    return dict(groups)


@cache
def internal_vectors() -> dict[str, list[dict[str, Any]]]:
    """Records of internal topics, control records and embedded formats by kind, bytes as bytes."""
    groups = defaultdict(list)
    for vector in _lines("internal"):
        for name in ("key", "value"):
            if vector[name] is not None:
                vector[name] = bytes.fromhex(vector[name])
        groups[vector["kind"]].append(vector)
    return dict(groups)


def record_vectors() -> list[dict[str, Any]]:
    """Record sets that Kafka wrote, with the values of Kafka's reader."""
    return list(_lines("records"))


def batch(frames: list[bytes]) -> tuple[Any, Any, Any]:
    """(buffer, starts, ends) of frames, one after another."""
    end = np.cumsum([len(frame) for frame in frames], dtype=np.int64)
    start = end - np.array([len(frame) for frame in frames], np.int64)
    return np.frombuffer(b"".join(frames), np.uint8), start, end


def to_json(value: Any) -> Any:
    """A decoded value in the notation of the vectors."""
    if isinstance(value, dict):
        return {str(name): to_json(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [to_json(inner) for inner in value]
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, UUID):
        return {"$uuid": str(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


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
        text = base64.urlsafe_b64encode(UUID(expected["$uuid"]).bytes)[:22].decode()
        assert got == text, where
    elif isinstance(expected, dict) and "$bytes" in expected:
        assert got == bytes.fromhex(expected["$bytes"]), where
    elif field.type.value == "struct":
        same(expected, got, field.fields, where)
    elif field.type.value == "float64":
        number = float(expected)
        assert math.isnan(got) if math.isnan(number) else repr(got) == repr(number), where
    elif isinstance(expected, str):  # tables show bytes that are no UTF-8 as U+FFFD
        assert got == expected.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), where
    else:
        assert type(got) is type(expected), where
        assert got == expected, where


def unknown_tags_of(value: Any, path: str = "") -> list[tuple[str, int, bytes]]:
    """(path, tag, data) of the unknown tags in a value of a vector."""
    found: list[tuple[str, int, bytes]] = []
    if isinstance(value, list):
        for at, one in enumerate(value):
            found += unknown_tags_of(one, f"{path}[{at}]")
    elif isinstance(value, dict):
        for name, one in value.items():
            if name == "_unknown_tags":
                tags = [(int(tag), bytes.fromhex(data["$bytes"])) for tag, data in one.items()]
                found += [(path, tag, data) for tag, data in tags]
            elif not name.startswith("$"):
                found += unknown_tags_of(one, f"{path}.{name}".removeprefix("."))
    return found


def tags_of_message(vector: dict[str, Any]) -> list[tuple[str, int, bytes]]:
    return unknown_tags_of(vector["header"], "header") + unknown_tags_of(vector["body"])


def value_definition(vector: dict[str, Any]) -> Definition:
    suffix = "Value" if vector["kind"] in WITH_KEYS else ""
    return catalog.definition(vector["name"] + suffix)


def check_row(vector: dict[str, Any], row: dict[str, Any]) -> None:
    """Assert that a row (key_version, value_version, key, value, value_unknown_tags) is it."""
    where = f"{vector['name']} {vector['version']}"
    assert row["value_version"] == vector["version"], where
    if vector["kind"] == "cluster_metadata":
        assert row["key_version"] is None
        assert "key" not in row
    elif vector["kind"] == "control_record":
        assert (row["key_version"], row["key"]) == (0, {"type": vector["type"]})
    else:
        assert row["key_version"] == vector["type"], where
        key = catalog.definition(vector["name"] + "Key")
        same(vector["key_body"], row["key"], key.fields, where)
    if vector["value_body"] is None:
        assert row["value"] is None, where
        return
    same(vector["value_body"], row["value"], value_definition(vector).fields, where)
    tags = [(tag["path"], tag["tag"], tag["data"]) for tag in row["value_unknown_tags"] or []]
    assert sorted(tags) == sorted(unknown_tags_of(vector["value_body"])), where
