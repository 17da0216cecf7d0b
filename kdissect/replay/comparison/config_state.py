"""Finds answers of DescribeConfigs that contradict themselves or each other.

- The first synonym of a config is the one in effect: it has the config's value and source.
- A broker's read-only configs are the same in all answers of a run, and its node.id is its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import decoded, entries

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
_BROKER, _NODE_ID = 4, "node.id"


class ConfigState:
    """Configs of a run's answers."""

    def __init__(self, ids: IdMap) -> None:
        self._answers: list[tuple[Outcome, Body]] = []

    def collect(self, outcome: Outcome) -> None:
        if outcome.step.exchange.api_key == ApiKey.DESCRIBE_CONFIGS:
            frame, version = outcome.answer or b"", outcome.api_version
            answer = decoded(frame, "response", ApiKey.DESCRIBE_CONFIGS, version)
            if answer is not None:
                self._answers.append((outcome, answer.body))

    def _configs(self) -> Iterator[tuple[Outcome, str, str, Body]]:
        """(outcome, path, broker, config) of all answers. broker: "" of another resource, and if
        the config can change."""
        for outcome, answer in self._answers:
            for i, result in enumerate(entries(answer["results"])):
                is_broker = result["resource_type"] == _BROKER
                for j, config in enumerate(entries(result["configs"])):
                    is_fixed = is_broker and config["read_only"]
                    broker = result["resource_name"] if is_fixed else ""
                    yield outcome, f"results[{i}].configs[{j}]", broker, config

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        values: dict[tuple[str, str], Counter[Any]] = defaultdict(Counter)
        for _, _, broker, config in self._configs():
            values[broker, config["name"]][config["value"]] += 1
        for outcome, path, broker, config in self._configs():
            value = config["value"]
            wanted = values[broker, config["name"]].most_common(1)[0][0] if broker else value
            if broker and config["name"] == _NODE_ID:
                wanted = broker
            if value != wanted:
                note = f"as other answers say of broker {broker}"
                add(outcome, f"{path}.value", wanted, value, note)
            for first in entries(config.get("synonyms"))[:1]:
                for name, own in (("value", value), ("source", config.get("config_source"))):
                    if first[name] != own:
                        note = "the first synonym is the one in effect"
                        add(outcome, f"{path}.synonyms", own, first[name], note)
