"""Kafka's vectors of internal topics, control records and embedded formats."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from functools import cache
from typing import Any

from kdissect.protocol import catalog
from kdissect.protocol.model import Definition
from tests.codec.message_vectors import same
from tests.material import VECTORS

LOGS = {
    "group_coordinator": ("group", "__consumer_offsets"),
    "transaction": ("transaction", "__transaction_state"),
    "share_coordinator": ("share", "__share_group_state"),
    "cluster_metadata": ("metadata", "__cluster_metadata"),
    "control_record": ("control", "orders"),
}


@cache
def internal_vectors() -> dict[str, list[dict[str, Any]]]:
    """All vectors by kind, bytes as bytes."""
    groups = defaultdict(list)
    with gzip.open(VECTORS / "internal.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            vector = json.loads(line)
            for name in ("key", "value"):
                if vector[name] is not None:
                    vector[name] = bytes.fromhex(vector[name])
            groups[vector["kind"]].append(vector)
    return dict(groups)


def value_definition(vector: dict[str, Any]) -> Definition:
    has_keys = vector["kind"] in ("group_coordinator", "transaction", "share_coordinator")
    return catalog.definition(vector["name"] + ("Value" if has_keys else ""))


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
    assert sorted(tags) == sorted(_tags(vector["value_body"], "")), where


def _tags(value: Any, path: str) -> list[tuple[str, int, bytes]]:
    found: list[tuple[str, int, bytes]] = []
    if isinstance(value, list):
        for at, one in enumerate(value):
            found += _tags(one, f"{path}[{at}]")
    elif isinstance(value, dict):
        for name, one in value.items():
            if name == "_unknown_tags":
                found += [
                    (path, int(tag), bytes.fromhex(data["$bytes"])) for tag, data in one.items()
                ]
            elif not name.startswith("$"):
                found += _tags(one, f"{path}.{name}".removeprefix("."))
    return found
