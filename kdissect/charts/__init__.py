"""Vega-Lite specifications of all charts, as files: the report's page and notebooks draw the same.

A `.vl.json` file holds a chart's marks, encodings and titles. A text ``$name`` in it is a
parameter: a title, a kind of scale, or names of ours. What came from a capture is data only: it
never becomes part of a specification, where Vega reads field names and expressions. `config.json`
has what all charts share: axes, and zooming by a mouse, so that a finger scrolls the page.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

Spec = dict[str, Any]

VEGA_LITE = "6.4"  # the version that draws them

# Events of a group, as charts name them, in the order of their colours.
EVENT_NAMES = {
    "rebalance": "rebalance",
    "join": "join",
    "sync": "sync",
    "heartbeat_error": "heartbeat refused",
    "leave": "leave",
    "commit_error": "commit refused",
    "stable": "stable",
}

# Severities of incidents, the worst first; the colours suit light and dark pages.
SEVERITY_COLOURS = {"bad": "#d1242f", "warn": "#bf8700", "info": "#7290b3"}


def load(name: str, /, **parameters: Any) -> Spec:
    """The specification `name`, without data. Its data source is called ``d``.

    Raises KeyError for a parameter that is not given, TypeError for one that it does not have.
    """
    unused = set(parameters)

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        if isinstance(value, str) and value.startswith("$"):
            unused.discard(value[1:])
            return parameters[value[1:]]
        return value

    spec: Spec = filled(_read(f"{name}.vl.json"))
    if unused:
        raise TypeError(f"{name} has no parameter {', '.join(sorted(unused))}")
    return {"data": {"name": "d"}, "config": _read("config.json"), **spec}


def event_detail(generation: int | None, detail: str | None) -> str:
    """The tooltip of a group's event."""
    parts = ["" if generation is None else f"generation {generation}", detail or ""]
    return ", ".join(part for part in parts if part)


def _read(file: str) -> Any:
    return json.loads(resources.files(__name__).joinpath(file).read_text("utf-8"))
