"""Finds rows in answers that were not final and that no request of the run explains.

ACLs, client quotas, SCRAM credentials and resources with configs change only by requests. So an
answer that was not final may lack a row of the final one, or have another one, only if

- a request about that row was under way, or had been answered a bounded time before; and
- a row that the final answer lacks is one that a request set or that another final answer has.

Clients that name a topic in Metadata, and streams groups, make topics, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode, error_name
from kdissect.replay.comparison.timing import METADATA_S, WRITE_S, Interval, interval_of
from kdissect.replay.comparison.tree_diff import ABSENT, TWICE
from kdissect.replay.model import Difference, Outcome
from kdissect.replay.workload.messages import TOPIC_RESOURCE, decoded, entries

Body = dict[str, Any]
_ACL = ("principal", "host", "operation", "permission_type")
_LITERAL = 3  # the pattern type of ACLs before KIP-290
_CLIENT_METRICS = 16  # the resource type of ListConfigResources v0 (KIP-714)
_OF_BROKERS = (4, 8)  # resource types: brokers and their loggers
_NOTHING = "nothing"  # the key of an empty list


class DescribedRow(NamedTuple):
    """key: what the row is about. value: None if there is only one, or if a request removes it."""

    key: tuple[Hashable, ...]
    value: Hashable = None


class DescribedRows:
    """The rows that requests set or remove, and those of final answers."""

    def __init__(self, outcomes: Sequence[Outcome], *, has_one_node: bool) -> None:
        self._bound_ns = int((METADATA_S if has_one_node else WRITE_S) * 1e9)
        # By the API that reads them: requests about a row, by its key; the rows that were there.
        self._changes: dict[tuple[Hashable, ...], list[Interval]] = defaultdict(list)
        self._rows: set[tuple[int, DescribedRow]] = set()
        retried = {each.step.exchange.api_key for each in outcomes if each.earlier}
        for outcome in outcomes:
            api_key = outcome.step.exchange.api_key
            if outcome.sent is None:
                continue
            if api_key in _READS:
                self._rows.update((api_key, row) for row in _rows(outcome))
            reads, change = _CHANGES.get(api_key, (-1, None))
            for row in _changed(outcome, change) if change and reads in retried else ():
                self._changes[reads, *row.key].append(interval_of(outcome))
                self._rows.add((reads, row))

    def wrong(self, outcome: Outcome, index: int) -> list[Difference]:
        """The rows of the answer `index` of `outcome.earlier` that nothing explains."""
        api_key = outcome.step.exchange.api_key
        if api_key not in _READS or outcome.earlier[index].error_codes:
            return []
        earlier = outcome.with_answer(index)
        final, answered = Counter(_rows(outcome)), Counter(_rows(earlier))
        path = _READS[api_key].path
        differences = [
            Difference(path, _text(row), ABSENT)
            for row in final - answered
            if not self._is_changing(api_key, row, earlier)
        ]
        for row in answered - final:
            if answered[row] > 1:
                differences.append(Difference(path, "once", _text(row), note=TWICE))
            elif (api_key, row) not in self._rows or not self._is_changing(api_key, row, earlier):
                differences.append(Difference(path, ABSENT, _text(row)))
        return differences

    def _is_changing(self, api_key: int, row: DescribedRow, answer: Outcome) -> bool:
        """Return whether a request about a row is under way when an answer is made."""
        return any(
            sent_ns <= answer.answered_ns and answered_ns >= answer.sent_ns - self._bound_ns
            for sent_ns, answered_ns in self._changes[api_key, *row.key]
        )


def _rows(outcome: Outcome) -> Iterator[DescribedRow]:
    """The rows of an answer; none if it has an error."""
    body = _body(outcome, "response")
    if body and not body["error_code"]:
        yield from _READS[outcome.step.exchange.api_key].rows(body)


def _changed(outcome: Outcome, change: _Change) -> Iterator[DescribedRow]:
    yield from change(_body(outcome, "request"), _body(outcome, "response"))


def _body(outcome: Outcome, side: str) -> Body:
    """The body of a request or an answer; empty if there is none."""
    frame = outcome.sent if side == "request" else outcome.answer
    message = decoded(frame or b"", side, outcome.step.exchange.api_key, outcome.api_version)
    return {} if message is None else message.body


def _text(row: DescribedRow) -> str:
    value = "" if row.value is None else f" = {row.value}"
    return f"{', '.join(map(str, row.key))}{value}"


# -- rows of messages -------------------------------------------------------------------------


def _acls(body: Body) -> Iterator[DescribedRow]:
    for resource in entries(body["resources"]):
        about = _acl_resource(resource)
        for acl in entries(resource["acls"]) or [{}]:
            yield DescribedRow((*about, *(acl.get(name, _NOTHING) for name in _ACL)))


def _acl_resource(body: Body) -> tuple[Hashable, ...]:
    pattern = body.get("resource_pattern_type", body.get("pattern_type", _LITERAL))
    return body["resource_type"], body["resource_name"], pattern


def _created_acls(request: Body, _: Body) -> Iterator[DescribedRow]:
    for acl in entries(request.get("creations")):
        yield DescribedRow((*_acl_resource(acl), *(acl[name] for name in _ACL)))


def _deleted_acls(_: Body, response: Body) -> Iterator[DescribedRow]:
    """Only the response says which ACLs a filter matches."""
    for result in entries(response.get("filter_results")):
        for acl in entries(result["matching_acls"]):
            yield DescribedRow((*_acl_resource(acl), *(acl[name] for name in _ACL)))


def _entity(body: Body) -> Hashable:
    """A user, a client id, an address or two of them; a name None is the default."""
    return tuple(sorted((part["entity_type"], str(part["entity_name"])) for part in body["entity"]))


def _quotas(body: Body) -> Iterator[DescribedRow]:
    for entry in entries(body["entries"]):
        for quota in entries(entry["values"]) or [{"key": _NOTHING, "value": None}]:
            yield DescribedRow((_entity(entry), quota["key"]), quota["value"])


def _altered_quotas(request: Body, _: Body) -> Iterator[DescribedRow]:
    for entry in entries(request.get("entries")):
        for op in entries(entry["ops"]):
            yield DescribedRow((_entity(entry), op["key"]), None if op["remove"] else op["value"])


def _credentials(body: Body) -> Iterator[DescribedRow]:
    for user in entries(body["results"]):
        if user["error_code"]:
            yield DescribedRow((user["user"], error_name(user["error_code"])))
            continue
        for one in entries(user["credential_infos"]) or [{"mechanism": _NOTHING}]:
            yield DescribedRow((user["user"], one["mechanism"]), one.get("iterations"))


def _altered_credentials(request: Body, _: Body) -> Iterator[DescribedRow]:
    for one in (*entries(request.get("deletions")), *entries(request.get("upsertions"))):
        yield DescribedRow((one["name"], one["mechanism"]), one.get("iterations"))
        yield DescribedRow((one["name"], ErrorCode.RESOURCE_NOT_FOUND.name))  # before or after it


def _resources(body: Body) -> Iterator[DescribedRow]:
    for one in entries(body["config_resources"]):
        kind, name = one.get("resource_type", _CLIENT_METRICS), one["resource_name"]
        if kind not in _OF_BROKERS and not name.startswith("__"):  # come by themselves
            yield DescribedRow((kind, name))


def _altered_configs(request: Body, _: Body) -> Iterator[DescribedRow]:
    for one in entries(request.get("resources")):
        yield DescribedRow((one["resource_type"], one["resource_name"]))


def _named_topics(request: Body, _: Body) -> Iterator[DescribedRow]:
    for topic in entries(request.get("topics")):
        if topic["name"]:
            yield DescribedRow((TOPIC_RESOURCE, topic["name"]))


def _internal_topics(request: Body, _: Body) -> Iterator[DescribedRow]:
    """The coordinator makes the internal topics of a topology (KIP-1071)."""
    topology = request.get("topology") or {}
    for part in entries(topology.get("subtopologies")):
        for topic in (*part["state_changelog_topics"], *part["repartition_source_topics"]):
            yield DescribedRow((TOPIC_RESOURCE, topic["name"]))


def _deleted_topics(_: Body, response: Body) -> Iterator[DescribedRow]:
    for topic in entries(response.get("responses")):
        yield DescribedRow((TOPIC_RESOURCE, topic["name"]))


class _Description(NamedTuple):
    """path: of the list in the response. rows: those of a response."""

    path: str
    rows: Callable[[Body], Iterator[DescribedRow]]


_Change = Callable[[Body, Body], Iterator[DescribedRow]]  # a request, its response -> rows
_READS: dict[int, _Description] = {
    ApiKey.DESCRIBE_ACLS: _Description("resources", _acls),
    ApiKey.DESCRIBE_CLIENT_QUOTAS: _Description("entries", _quotas),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: _Description("results", _credentials),
    ApiKey.LIST_CONFIG_RESOURCES: _Description("config_resources", _resources),
}
_CONFIGS, _ACLS = ApiKey.LIST_CONFIG_RESOURCES, ApiKey.DESCRIBE_ACLS
_CREDENTIALS = ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS
# API -> the API that reads what it changes, and the rows of a request
_CHANGES: dict[int, tuple[int, _Change]] = {
    ApiKey.CREATE_ACLS: (_ACLS, _created_acls),
    ApiKey.DELETE_ACLS: (_ACLS, _deleted_acls),
    ApiKey.ALTER_CLIENT_QUOTAS: (ApiKey.DESCRIBE_CLIENT_QUOTAS, _altered_quotas),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: (_CREDENTIALS, _altered_credentials),
    ApiKey.ALTER_CONFIGS: (_CONFIGS, _altered_configs),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: (_CONFIGS, _altered_configs),
    ApiKey.CREATE_TOPICS: (_CONFIGS, _named_topics),
    ApiKey.METADATA: (_CONFIGS, _named_topics),  # may create them
    ApiKey.STREAMS_GROUP_HEARTBEAT: (_CONFIGS, _internal_topics),
    ApiKey.DELETE_TOPICS: (_CONFIGS, _deleted_topics),
}
