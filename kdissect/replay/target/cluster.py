"""Queries the target's API versions, cluster id, nodes and topics, before and during a replay.

The requests go over connections that carry no captured requests. Metadata is requested again before
a captured request is sent again, and while the target settles.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

from kdissect.errors import EnvironmentFailed
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode, error_name
from kdissect.protocol.layout import layout
from kdissect.protocol.releases import taken
from kdissect.replay.model import OptionError
from kdissect.replay.target.connection import Access, ConnectFailed, Link, connect, request
from kdissect.replay.translation.id_map import TargetCluster
from kdissect.replay.workload.messages import EARLIEST, LATEST, Body, is_transient, partitions

_ONE_COORDINATOR = 3  # later versions of FindCoordinator have a list of keys (KIP-699)
READY_S = 10.0
_PAUSES_S = (0.01, 0.02, 0.05)  # the last one again and again
_ASK_TIMEOUT_S = 15.0
_ANY_VERSION = 0x7FFF
_FIRST_ASKED: dict[int, tuple[int, int]] = {ApiKey.API_VERSIONS: (0, 3)}  # before it told them
# By kinds of names: the API that lists them; its array, and the fields of a name and its state.
LISTING_APIS = {"group": ApiKey.LIST_GROUPS, "transactional-id": ApiKey.LIST_TRANSACTIONS}
_LISTS = {
    "group": ("groups", "group_id", "group_state"),
    "transactional-id": ("transaction_states", "transactional_id", "transaction_state"),
}


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


async def tries(limit_s: float = math.inf) -> AsyncIterator[None]:
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
    cluster: TargetCluster = field(default_factory=TargetCluster)
    versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    _links: dict[tuple[str, int], Link] = field(default_factory=dict)
    _opening: dict[tuple[str, int], asyncio.Lock] = field(default_factory=dict)

    def __str__(self) -> str:
        return show_address(self.host, self.port)

    def address(self, node_id: int | None) -> tuple[str, int]:
        """The address of a node. A cluster of one node has the address that the user gave."""
        given, several = (self.host, self.port), self.cluster.several
        return given if node_id is None else several.get(node_id, given)

    def version(self, api_key: int, last: int = _ANY_VERSION) -> int | None:
        """The newest api_version up to `last` that both sides know; None if there is none."""
        ours = catalog.api(api_key).request.versions
        first, newest = (self.versions or _FIRST_ASKED).get(api_key, (0, -1))
        version = min(newest, ours[1], last)
        return version if version >= max(first, ours[0]) else None

    async def ask(
        self,
        api_key: int,
        body: Body,
        node_id: int | None = None,
        *,
        last: int = _ANY_VERSION,
        limit_s: float = _ASK_TIMEOUT_S,
    ) -> Body:
        """Ask a node over a connection that stays open, and return the body of its answer.

        body: of the request; fields that the version lacks are left out. node_id: None asks the
        address that the user gave, or another node if that does not answer. last: no later version
        is used. limit_s: for each of them. Raises ConnectFailed.
        """
        version, api = self.version(api_key, last), catalog.api(api_key)
        if version is None:
            raise ConnectFailed("unreachable", f"the target speaks no {api.name} that is used here")
        known = layout(api.request, version).by_name
        fields = {name: value for name, value in body.items() if name in known}
        others = self.cluster.several if node_id is None else ()
        for where in dict.fromkeys(map(self.address, (node_id, *others))):
            opening = self._opening.setdefault(where, asyncio.Lock())
            try:
                async with asyncio.timeout(limit_s + self.access.connect_timeout):
                    async with opening:
                        link = self._links.get(where)
                        if link is None or link.lost is not None:
                            link = self._links[where] = await connect(*where, self.access)
                    return (await link.ask(request(api_key, version, fields))).body
            except ConnectFailed as error:
                failed = error
            except TimeoutError:
                failed = ConnectFailed("timeout", f"{api.name} was not answered")
        raise failed

    async def probe(self) -> None:
        """Versions, cluster id, nodes, all topics. Raises EnvironmentFailed."""
        try:
            answer = await self.ask_versions()
            if answer["error_code"]:
                said = f"ApiVersions was answered with error {answer['error_code']}"
                raise ConnectFailed("unreachable", said)
            self.versions = {
                each["api_key"]: (each["min_version"], each["max_version"])
                for each in answer["api_keys"]
            }
            self.cluster = TargetCluster(ranges=taken(self.versions))
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

    async def ask_versions(self, node_id: int | None = None) -> Body:
        """The body of the response to ApiVersions, with features if the target has them. Raises
        ConnectFailed."""
        software = {"client_software_name": "kdissect", "client_software_version": "1"}
        answer = await self.ask(ApiKey.API_VERSIONS, software, node_id, last=3)
        if answer["error_code"] == ErrorCode.UNSUPPORTED_VERSION:
            return await self.ask(ApiKey.API_VERSIONS, {}, node_id, last=0)
        return answer

    async def learn_metadata(self, topics: Collection[str] | None = None) -> None:
        """Request Metadata of some topics, None for all. Raises ConnectFailed."""
        named = None if topics is None else [{"name": name} for name in topics]
        body = {"topics": named, "allow_auto_topic_creation": False}
        answer = await self.ask(ApiKey.METADATA, body)
        if topics is None:
            self.cluster.learn_all(answer)
        else:
            self.cluster.learn_metadata(answer)

    async def coordinator(self, key_type: int, key: str, wait_s: float = READY_S) -> int | None:
        """The node that coordinates a group or transaction; None if it is not ready after `wait_s`.

        A new cluster creates the internal topics of groups and transactions on the first request.
        Raises ConnectFailed.
        """
        body = {"key": key, "key_type": key_type}
        async for _ in tries(wait_s):
            answer = await self.ask(ApiKey.FIND_COORDINATOR, body, last=_ONE_COORDINATOR)
            if not is_transient(ApiKey.FIND_COORDINATOR, answer["error_code"]):
                break
        if answer["error_code"]:
            return None
        self.cluster.coordinators[key_type, key] = answer["node_id"]
        return int(answer["node_id"])

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
        led: dict[int, dict[str, list[dict[str, int]]]] = {}  # by leader and topic
        for (name, number), (leader, _) in self.cluster.leaders.items():
            if name in names:
                asked = {"partition_index": number, "timestamp": timestamp}
                led.setdefault(leader, {}).setdefault(name, []).append(asked)
        found: dict[tuple[str, int], int] = {}
        for leader, by_topic in led.items():
            topics = [{"name": name, "partitions": asked} for name, asked in by_topic.items()]
            body = {"replica_id": -1, "topics": topics}
            answer = await self.ask(ApiKey.LIST_OFFSETS, body, leader)
            for topic, number, each in partitions(answer):
                if each["error_code"] == 0:
                    found[topic["name"], number] = each["offset"]
        return found

    async def states(
        self,
        kind: str,
        names: Collection[str] = (),
        passing: Collection[str] = (),
        limit_s: float = READY_S,
    ) -> dict[str, str]:
        """Each "group" of any type, or "transactional-id", with its state.

        Asks again for `limit_s` while a coordinator is not ready, or one of `names` is in a passing
        state. No transactional ids before Kafka 3.0 (KIP-664), no states of groups before 2.6
        (KIP-518). Raises ConnectFailed.
        """
        api_key, (array, name, state) = LISTING_APIS[kind], _LISTS[kind]
        found, code = dict[str, str](), 0
        if self.version(api_key) is None:
            return found
        async for _ in tries(limit_s):
            found, code = {}, 0
            for node_id in list(self.cluster.nodes):  # each coordinator lists its own
                answer = await self.ask(api_key, {}, node_id)
                code = code or answer["error_code"]
                found |= {each[name]: each.get(state) or f"a {kind}" for each in answer[array]}
            is_passing = any(found.get(each) in passing for each in names)
            if not is_passing and not is_transient(api_key, code):
                break
        if code:
            listing = catalog.api(api_key).name
            raise ConnectFailed("unreachable", f"{listing} was answered {error_name(code)}")
        return found

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._opening.clear()
