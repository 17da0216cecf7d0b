"""The broker's request log: one entry for each request that a broker completed."""

import functools
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

Key = tuple[str, int, int, int, int, int]
"""client ip, client port, broker port, correlation id, api key, api version"""


@dataclass(frozen=True)
class Entry:
    """A logged request. Bodies are JSON objects, or text where the broker is older than 2.6."""

    key: Key
    api_name: str  # in Kafka's upper case
    client_id: str  # "" also for null
    principal: str
    is_forwarded: bool
    request: dict[str, Any] | str
    response: dict[str, Any] | str

    def __str__(self) -> str:
        client_ip, client_port, broker_port, correlation_id, _, api_version = self.key
        return (
            f"{client_ip}:{client_port}->{broker_port} #{correlation_id} "
            f"{self.api_name} v{api_version}"
        )


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a list beside a capture: its requests, or its produced records."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


KEY = itemgetter("correlation_id", "api_key", "api_version")


@functools.lru_cache(maxsize=2)
def load(path: Path) -> list[Entry]:
    """All entries of NAME.requests.jsonl.gz, in the order in which they were completed."""
    return [
        Entry(
            key=(*one["client"], one["broker"][1], *KEY(one)),
            api_name=one["api_name"],
            client_id=one["client_id"] or "",
            principal=one["principal"],
            is_forwarded=one["forwarded"],
            request=one.get("request", one.get("request_text")),
            response=one.get("response", one.get("response_text")),
        )
        for one in read_lines(path)
    ]


def by_key(entries: list[Entry]) -> dict[Key, list[Entry]]:
    """Entries of a key in their order: ids repeat where a connection reuses a port or an id."""
    found: dict[Key, list[Entry]] = defaultdict(list)
    for entry in entries:
        found[entry.key].append(entry)
    return found
