"""Queries the target's API versions, cluster id, nodes and topics, before and during a replay.

The requests go over connections that carry no captured requests. Metadata is requested
again when a captured request needs a topic that is not known yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kdissect.codec.message import Message
from kdissect.errors import EnvironmentFailed
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode, error_name
from kdissect.protocol.releases import taken
from kdissect.replay.model import OptionError
from kdissect.replay.target.connection import Access, ConnectFailed, Link, connect, request
from kdissect.replay.translation.id_map import Cluster
from kdissect.replay.workload.messages import EARLIEST, LATEST, partitions

_ONE_COORDINATOR_MAX = 3  # later versions of FindCoordinator have a list of keys (KIP-699)
_LOADING = frozenset(
    {
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
    }
)
READY_S = 10.0
_PAUSES_S = (0.01, 0.02, 0.05)  # the last one again and again
_ASK_TIMEOUT_S = 15.0
# Kinds of names -> API that lists them; its array, and the fields of a name and its state there.
_LISTS = {
    "group": (ApiKey.LIST_GROUPS, "groups", "group_id", "group_state"),
    "transactional-id": (
        ApiKey.LIST_TRANSACTIONS, "transaction_states", "transactional_id", "transaction_state",
    ),
}  # fmt: skip


def parse_address(text: str) -> tuple[str, int]:
    """``host:port``, ``[::1]:9092``. Raises OptionError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host or ("::" in host and not text.startswith("[")) or not port.isdigit():
        raise OptionError(f"{text!r} is no HOST:PORT ([HOST]:PORT for IPv6)")
    if not 0 < int(port) < 65536:
        raise OptionError(f"{text!r}: no such port")
    return host, int(port)


def show_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def tries(limit_s: float) -> AsyncIterator[None]:
    """Yield at least once, and again and again, after pauses, until the time is over."""
    loop = asyncio.get_running_loop()
    end, count = loop.time() + limit_s, 0
    while True:
        yield
        if loop.time() >= end:
            return
        await asyncio.sleep(_PAUSES_S[min(count, len(_PAUSES_S) - 1)])
        count += 1


@dataclass(eq=False)
class Target:
    """The cluster that a replay sends its requests to.

    host, port: the address that the user gave.
    versions: api_key -> (min, max), as it offers them.
    """

    host: str
    port: int
    access: Access = field(default_factory=Access)
    cluster: Cluster = field(default_factory=Cluster)
    versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    _links: dict[tuple[str, int], Link] = field(default_factory=dict)
    _opening: dict[tuple[str, int], asyncio.Lock] = field(default_factory=dict)

    def __str__(self) -> str:
        return show_address(self.host, self.port)

    def address(self, node_id: int | None) -> tuple[str, int]:
        """The address of a node. A cluster of one node has the address that the user gave."""
        nodes = self.cluster.nodes
        if node_id is None or len(nodes) < 2 or node_id not in nodes:
            return self.host, self.port
        return nodes[node_id]

    def newest(self, api_key: int) -> int | None:
        """The newest api_version that both sides know; None where there is none."""
        if api_key not in self.versions:
            return None
        ours = catalog.api(api_key).request.versions
        first, last = self.versions[api_key]
        newest = min(last, ours[1])
        return newest if newest >= max(first, ours[0]) else None

    def version(self, api_key: int, last: int | None = None) -> int:
        """The newest api_version up to `last` that both sides know. Raises ConnectFailed."""
        newest = self.newest(api_key)
        version = newest if last is None or newest is None else min(newest, last)
        if version is None or version < self.versions[api_key][0]:
            name = catalog.api(api_key).name
            raise ConnectFailed("unreachable", f"the target speaks no {name} that is used here")
        return version

    async def ask(
        self,
        api_key: int,
        api_version: int,
        body: Mapping[str, Any],
        node_id: int | None = None,
        limit_s: float = _ASK_TIMEOUT_S,
    ) -> Message:
        """One question of the replay's own to a node, over a connection that stays open.

        node_id: None asks the address that the user gave. Raises ConnectFailed.
        """
        where = self.address(node_id)
        opening = self._opening.setdefault(where, asyncio.Lock())
        name = catalog.api(api_key).name
        try:
            async with asyncio.timeout(limit_s + self.access.connect_timeout):
                async with opening:
                    link = self._links.get(where)
                    if link is None or link.lost is not None:
                        link = self._links[where] = await connect(*where, self.access)
                return await link.ask(request(api_key, api_version, dict(body)))
        except TimeoutError:
            raise ConnectFailed("timeout", f"{name} was not answered") from None

    async def probe(self) -> None:
        """Versions, cluster id, nodes, all topics. Raises EnvironmentFailed."""
        try:
            answer = (await self.ask_versions()).body
            if answer["error_code"]:
                said = f"ApiVersions was answered with error {answer['error_code']}"
                raise ConnectFailed("unreachable", said)
            self.versions = {
                each["api_key"]: (each["min_version"], each["max_version"])
                for each in answer["api_keys"]
            }
            self.cluster = Cluster(ranges=taken(self.versions))
            await self.learn_metadata()
        except ConnectFailed as error:
            raise EnvironmentFailed(f"{self}: {error}{self._hint(error)}") from None

    def _hint(self, error: ConnectFailed) -> str:
        """Options that may be missing if a listener closes connections without an error."""
        given = {"--tls": self.access.tls, "--sasl": self.access.sasl}
        wanted = " or ".join(option for option in given if given[option] is None)
        words = ("closed by", "reset", "no answer", "no Kafka")
        is_mute = error.kind in ("unreachable", "timeout") and any(
            word in str(error) for word in words
        )
        return f"; does this port want {wanted}?" if is_mute and wanted else ""

    async def ask_versions(self, node_id: int | None = None) -> Message:
        """The response to ApiVersions, with features if the target has them. Raises
        ConnectFailed."""
        software = {"client_software_name": "kdissect", "client_software_version": "1"}
        answer = await self.ask(ApiKey.API_VERSIONS, 3, software, node_id)
        if answer.body["error_code"] == ErrorCode.UNSUPPORTED_VERSION:
            return await self.ask(ApiKey.API_VERSIONS, 0, {}, node_id)
        return answer

    async def learn_metadata(self, topics: Collection[str] | None = None) -> None:
        """Request Metadata of some topics, None for all. Raises ConnectFailed."""
        version = self.version(ApiKey.METADATA)
        named = None if topics is None else [{"name": name} for name in topics]
        body: dict[str, Any] = {"topics": named}
        if version >= 4:
            body["allow_auto_topic_creation"] = False
        answer = (await self.ask(ApiKey.METADATA, version, body)).body
        if topics is None:
            self.cluster.learn_all(answer)
        else:
            self.cluster.learn_metadata(answer)

    async def coordinator(self, key_type: int, key: str, wait_s: float = READY_S) -> int | None:
        """The node that coordinates a group or transaction; None if it is not ready after `wait_s`.

        A new cluster creates the internal topics of groups and transactions on the first request.
        Raises ConnectFailed.
        """
        version = self.newest(ApiKey.FIND_COORDINATOR)
        if version is None:
            return None
        version = min(version, _ONE_COORDINATOR_MAX)  # one key a request
        body = {"key": key, "key_type": key_type} if version else {"key": key}
        answer = await self._ask_until_loaded(ApiKey.FIND_COORDINATOR, version, body, None, wait_s)
        if answer["error_code"]:
            return None
        self.cluster.coordinators[key_type, key] = answer["node_id"]
        return int(answer["node_id"])

    async def _ask_until_loaded(
        self, api_key: int, version: int, body: dict[str, Any], node_id: int | None, wait_s: float
    ) -> dict[str, Any]:
        """The body of an answer, after a coordinator has loaded its groups or transactions."""
        async for _ in tries(wait_s):
            answer = (await self.ask(api_key, version, body, node_id)).body
            if answer["error_code"] not in _LOADING:
                break
        return answer

    def led(self) -> dict[int, dict[str, list[int]]]:
        """leader -> topic -> partitions."""
        by_leader: dict[int, dict[str, list[int]]] = {}
        for (name, number), (leader, _) in sorted(self.cluster.leaders.items()):
            by_leader.setdefault(leader, {}).setdefault(name, []).append(number)
        return by_leader

    async def extents(self, names: Collection[str]) -> dict[tuple[str, int], tuple[int, int]]:
        """(topic, partition) -> first offset and end of its log. Raises ConnectFailed."""
        starts = await self.log_offsets(names, EARLIEST)
        ends = await self.log_offsets(names, LATEST)
        return {log: (starts[log], ends[log]) for log in sorted(starts.keys() & ends.keys())}

    async def log_offsets(
        self, names: Collection[str], timestamp: int
    ) -> dict[tuple[str, int], int]:
        """(topic, partition) -> offset, for partitions whose leader returns one. timestamp:
        `EARLIEST` or `LATEST`.

        Raises ConnectFailed.
        """
        version = self.newest(ApiKey.LIST_OFFSETS)
        if version is None:
            return {}
        found: dict[tuple[str, int], int] = {}
        for leader, led in self.led().items():
            topics = []
            for name in led.keys() & set(names):
                asked = [{"partition_index": each, "timestamp": timestamp} for each in led[name]]
                topics.append({"name": name, "partitions": asked})
            if topics:
                body = {"replica_id": -1, "topics": topics}
                answer = await self.ask(ApiKey.LIST_OFFSETS, version, body, leader)
                for topic, number, each in partitions(answer.body):
                    if each["error_code"] == 0:
                        found[topic["name"], number] = each["offset"]
        return found

    async def states(self, kind: str) -> dict[str, str]:
        """Each "group" of any type, or "transactional-id", with its state. No transactional ids
        before Kafka 3.0 (KIP-664). Raises ConnectFailed."""
        api_key, array, name, state = _LISTS[kind]
        version, found = self.newest(api_key), dict[str, str]()
        if version is None:
            return found
        for node_id in list(self.cluster.nodes):  # each coordinator lists its own
            answer = await self._ask_until_loaded(api_key, version, {}, node_id, READY_S)
            if code := answer["error_code"]:
                listing = catalog.api(api_key).name
                raise ConnectFailed("unreachable", f"{listing} was answered {error_name(code)}")
            found |= {each[name]: each.get(state) or f"a {kind}" for each in answer[array]}
        return found

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._opening.clear()
