"""Finds answers of DescribeConfigs that contradict themselves or each other.

- The first synonym of a config is the one in effect: it has the config's value and source. The last
  one is the default, if it is so in the capture.
- A config has the same value and source in all answers of a run if it is read-only, or if the only
  broker gets no request to change it. A broker's node.id is its own.
- An answer has each resource of its request. The only broker lists the same configs of a topic, and
  of itself, in all answers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import TOPIC_RESOURCE, decoded, entries, response_of
from kdissect.text import plural

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
_Key = tuple[int, str, str]  # type and name of a resource, name of a config
_ALL = ""  # configs of a resource
_BROKER, _NODE_ID = 4, "node.id"
_VALUES = frozenset({"value", "config_source"})
_DEFAULT = 5  # a source
_CHANGES = frozenset({ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS, ApiKey.DELETE_TOPICS})


class ConfigState:
    """Configs of a run's answers."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._answers: list[tuple[Outcome, Body]] = []
        self._requested: dict[int, Body] = {}  # step -> the body of its request
        self._changed: set[_Key] = set()

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if api_key not in _CHANGES | {ApiKey.DESCRIBE_CONFIGS}:
            return
        request = decoded(outcome.sent or b"", "request", api_key, outcome.api_version)
        if request is None:
            return
        if api_key in _CHANGES:
            self._change(api_key, request.body)
            return
        answer = decoded(outcome.answer or b"", "response", api_key, outcome.api_version)
        if answer is not None:
            self._answers.append((outcome, answer.body))
            self._requested[outcome.step.number] = request.body

    def _change(self, api_key: int, request: Body) -> None:
        """Note the configs that a request changes, and the topics that it deletes."""
        for resource in entries(request.get("resources")):
            key = resource["resource_type"], resource["resource_name"]
            names = [config["name"] for config in entries(resource["configs"])]
            if api_key == ApiKey.ALTER_CONFIGS:
                names = [_ALL]  # those that it does not name get their defaults
            self._changed.update((*key, name) for name in names)
        topics = [
            *entries(request.get("topic_names")),
            *map(self._ids.target.topic_name, entries(request.get("topics"))),
        ]
        self._changed.update((TOPIC_RESOURCE, name, _ALL) for name in topics)

    def _configs(self) -> Iterator[tuple[Outcome, str, _Key, Body]]:
        """(outcome, path, key, config) of all answers."""
        for outcome, answer in self._answers:
            for i, result in enumerate(entries(answer["results"])):
                resource = result["resource_type"], result["resource_name"]
                for j, config in enumerate(entries(result["configs"])):
                    yield outcome, f"results[{i}].configs[{j}]", (*resource, config["name"]), config

    def _can_change(self, key: _Key, config: Body) -> bool:
        """Return whether answers may have several values: the run changes them, or brokers have
        other defaults."""
        kind, name, _ = key
        if kind == _BROKER and config["read_only"]:
            return False
        is_changed = bool(self._changed & {key, (kind, name, _ALL)})
        is_changed |= any(each == _BROKER for each, *_ in self._changed)
        return is_changed or len(self._ids.target.nodes) > 1

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        self._check_values(add)
        self._check_lists(add)
        with_default = {each.step.number: _with_default(each) for each, _ in self._answers}
        for outcome, path, key, config in self._configs():
            name, value = key[-1], config["value"]
            synonyms, path = entries(config.get("synonyms")), f"{path}.synonyms"
            for first in synonyms[:1]:
                for field, own in (("value", value), ("source", config.get("config_source"))):
                    if first[field] != own:
                        note = "the first synonym is the one in effect"
                        add(outcome, path, own, first[field], note)
            if len({(each["name"], each["source"]) for each in synonyms}) < len(synonyms):
                add(outcome, path, "each once", f"{len(synonyms)} synonyms", "one is listed twice")
            default = with_default[outcome.step.number].get(name)
            last = synonyms[-1] if synonyms else {}
            if default and synonyms and (last["source"], last["name"]) != (_DEFAULT, default):
                note = "the captured list ends with it"
                found = f"{last['name']} of source {last['source']}"
                add(outcome, path, f"the default of {default} at the end", found, note)

    def _check_values(self, add: Add) -> None:
        values: dict[tuple[_Key, str], Counter[Any]] = defaultdict(Counter)
        for _, _, key, config in reversed(list(self._configs())):  # of equals, the later one
            for field in _VALUES & config.keys():
                values[key, field][config[field]] += 1
        for outcome, path, key, config in self._configs():
            if self._can_change(key, config):
                continue
            kind, resource, name = key
            for field in _VALUES & config.keys():
                wanted = values[key, field].most_common(1)[0][0]
                if (kind, name, field) == (_BROKER, _NODE_ID, "value"):
                    wanted = resource
                if config[field] != wanted:
                    note = f"as other answers say of {resource}"
                    add(outcome, f"{path}.{field}", wanted, config[field], note)

    def _check_lists(self, add: Add) -> None:
        names: dict[tuple[int, str], Counter[frozenset[str]]] = defaultdict(Counter)
        for outcome, answer in reversed(self._answers):
            for resource, _, listed in self._lists(outcome, answer):
                names[resource][listed] += 1
        for outcome, answer in self._answers:
            requested = self._requested[outcome.step.number]["resources"]
            for kind, name in sorted(_resources_of(requested) - _resources_of(answer["results"])):
                add(outcome, "results", f"{name} of type {kind}", "absent", "it was requested")
            for resource, path, listed in self._lists(outcome, answer):
                usual, _ = names[resource].most_common(1)[0]
                changed = {name for *each, name in self._changed if tuple(each) == resource}
                missing = usual - listed - changed
                if missing:
                    note = f"other answers have {plural(len(missing), 'more config')}"
                    add(outcome, path, min(missing), "absent", note)

    def _lists(
        self, outcome: Outcome, answer: Body
    ) -> Iterator[tuple[tuple[int, str], str, frozenset[str]]]:
        """(resource, path, names) of the whole lists of configs of topics and of the only
        broker."""
        requested = self._requested[outcome.step.number]["resources"]
        whole = _resources_of(each for each in requested if each["configuration_keys"] is None)
        for i, result in enumerate(answer["results"]):
            resource = result["resource_type"], result["resource_name"]
            is_listed = resource[0] in (TOPIC_RESOURCE, _BROKER) and resource[1]
            if is_listed and resource in whole and self._ids.target.has_one_node:
                if not result["error_code"]:
                    configs = entries(result["configs"])
                    yield resource, f"results[{i}].configs", frozenset(c["name"] for c in configs)


def _resources_of(elements: Iterable[Body]) -> set[tuple[int, str]]:
    return {(each["resource_type"], each["resource_name"]) for each in elements}


def _with_default(outcome: Outcome) -> dict[str, str]:
    """The configs in the captured response whose list of synonyms ends with the default, and the
    name of that."""
    captured = response_of(outcome.step.exchange)
    return {
        config["name"]: last["name"]
        for result in entries(None if captured is None else captured.body["results"])
        for config in entries(result["configs"])
        for last in entries(config.get("synonyms"))[-1:]
        if last["source"] == _DEFAULT
    }
