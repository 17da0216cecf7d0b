"""Finds answers of DescribeConfigs that contradict themselves or each other.

- The first synonym of a config is the one in effect: it has the config's value and source.
- A config has the same value in all answers of a run if it is read-only, or if the only broker is
  not requested to change it. A broker's node.id is its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import TOPIC_RESOURCE, decoded, entries

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
_Resource = tuple[int, str]  # type and name
_BROKER, _NODE_ID = 4, "node.id"
_CHANGES = frozenset({ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS, ApiKey.DELETE_TOPICS})


class ConfigState:
    """Configs of a run's answers."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._answers: list[tuple[Outcome, Body]] = []
        self._changed: set[_Resource] = set()

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if api_key in _CHANGES:
            request = decoded(outcome.sent or b"", "request", api_key, outcome.api_version)
            self._change({} if request is None else request.body)
        elif api_key == ApiKey.DESCRIBE_CONFIGS:
            for each in outcome.by_answer():
                answer = decoded(each.answer or b"", "response", api_key, each.api_version)
                if answer is not None:
                    self._answers.append((each, answer.body))

    def _change(self, request: Body) -> None:
        """Note the resources of a request that changes or deletes them."""
        resources = entries(request.get("resources"))
        self._changed.update((each["resource_type"], each["resource_name"]) for each in resources)
        names = [
            *entries(request.get("topic_names")),
            *map(self._ids.target.topic_name, entries(request.get("topics"))),
        ]
        self._changed.update((TOPIC_RESOURCE, name) for name in names)

    def _configs(self) -> Iterator[tuple[Outcome, str, _Resource, Body]]:
        """(outcome, path, resource, config) of all answers."""
        for outcome, answer in self._answers:
            for i, result in enumerate(entries(answer["results"])):
                resource = result["resource_type"], result["resource_name"]
                for j, config in enumerate(entries(result["configs"])):
                    yield outcome, f"results[{i}].configs[{j}]", resource, config

    def _can_change(self, resource: _Resource, config: Body) -> bool:
        """Return whether answers may have several values: the run changes them, or brokers have
        other defaults."""
        if resource[0] == _BROKER and config["read_only"]:
            return False
        is_changed = resource in self._changed or any(kind == _BROKER for kind, _ in self._changed)
        return is_changed or len(self._ids.target.nodes) > 1

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        values: dict[tuple[_Resource, str], Counter[Any]] = defaultdict(Counter)
        for _, _, resource, config in reversed(list(self._configs())):  # of equals, the later one
            values[resource, config["name"]][config["value"]] += 1
        for outcome, path, resource, config in self._configs():
            value = config["value"]
            wanted = values[resource, config["name"]].most_common(1)[0][0]
            if resource[0] == _BROKER and config["name"] == _NODE_ID:
                wanted = resource[1]
            if value != wanted and not self._can_change(resource, config):
                note = f"as other answers say of {resource[1]}"
                add(outcome, f"{path}.value", wanted, value, note)
            for first in entries(config.get("synonyms"))[:1]:
                for name, own in (("value", value), ("source", config.get("config_source"))):
                    if first[name] != own:
                        note = "the first synonym is the one in effect"
                        add(outcome, f"{path}.synonyms", own, first[name], note)
