"""Finds answers of DescribeConfigs that contradict themselves or each other.

- The first synonym of a config is the one in effect: it has the config's value and source. The last
  one is the default, if it is so in the capture.
- A config has the same value in all answers of a run if it is read-only, or if the only broker gets
  no request to change it. A broker's node.id is its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import TOPIC_RESOURCE, decoded, entries, response_of

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
_Key = tuple[int, str, str]  # type and name of a resource, name of a config
_ALL = ""  # configs of a resource
_BROKER, _NODE_ID = 4, "node.id"
_DEFAULT = 5  # a source
_CHANGES = frozenset({ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS, ApiKey.DELETE_TOPICS})


class ConfigState:
    """Configs of a run's answers."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._answers: list[tuple[Outcome, Body]] = []
        self._changed: set[_Key] = set()

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if api_key in _CHANGES:
            request = decoded(outcome.sent or b"", "request", api_key, outcome.api_version)
            self._change(api_key, {} if request is None else request.body)
        elif api_key == ApiKey.DESCRIBE_CONFIGS:
            answer = decoded(outcome.answer or b"", "response", api_key, outcome.api_version)
            if answer is not None:
                self._answers.append((outcome, answer.body))

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
        values: dict[_Key, Counter[Any]] = defaultdict(Counter)
        for _, _, key, config in reversed(list(self._configs())):  # of equals, the later one
            values[key][config["value"]] += 1
        with_default = {each.step.number: _with_default(each) for each, _ in self._answers}
        for outcome, path, key, config in self._configs():
            kind, resource, name = key
            value, wanted = config["value"], values[key].most_common(1)[0][0]
            if (kind, name) == (_BROKER, _NODE_ID):
                wanted = resource
            if value != wanted and not self._can_change(key, config):
                note = f"as other answers say of {resource}"
                add(outcome, f"{path}.value", wanted, value, note)
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
