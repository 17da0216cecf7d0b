"""What charts are made of: Vega-Lite compiled to Vega, axes, series, and the library itself.

What came from the capture is data only: it never becomes part of a specification, where a field's
name or an expression would be read by Vega. Colours come from the page, which knows its theme:
marks name their series, never a colour. Legends are the page's too, since they have to wrap on a
phone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kdissect.text import visible

Spec = dict[str, Any]
Columns = dict[str, list[Any]]

VEGA_LITE = "6.4"
NEUTRAL = "#8b949e"  # of what is no series: good on light and on dark
_DAY_MS, _HOUR_MS = 86_400_000, 3_600_000
# dragging zooms where a mouse does it; a finger goes on scrolling the page
ZOOM = {
    "name": "zoom",
    "select": {
        "type": "interval",
        "encodings": ["x"],
        "translate": "[pointerdown[event.pointerType === 'mouse'], window:pointerup] > "
        "window:pointermove!",
        "zoom": "wheel![event.shiftKey]",
    },
    "bind": "scales",
}


@dataclass(slots=True)
class Chart:
    """A chart: where it stands, what it says in words, its data and how to draw it."""

    id: str
    title: str
    text: str  # what the picture shows, for who does not see it
    data: Columns
    spec: Spec
    height: int = 220
    series: list[str] = field(default_factory=list)  # in the order of their colours
    shown: list[str] | None = None  # those of them that the data has, if not all
    choose: str | None = None  # a column of `data` that a menu narrows to one value
    choose_label: str = ""
    zooms: bool = False
    labels: dict[str, str] = field(default_factory=dict)  # column -> heading of the data table

    def to_json(self) -> dict[str, Any]:
        return {
            "spec": compiled(self.spec),
            "data": self.data,
            "choose": self.choose,
            "legend": [
                [name, number]
                for number, name in enumerate(self.series)
                if self.shown is None or name in self.shown
            ],
            "labels": self.labels,
        }


def compiled(spec: Spec) -> Spec:
    """The Vega of a Vega-Lite specification."""
    import vl_convert

    whole = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "data": {"name": "d"},
        "background": None,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": {"view": {"stroke": None}},
        **spec,
    }
    vega: Spec = vl_convert.vegalite_to_vega(whole, vl_version=VEGA_LITE)
    vega.pop("$schema", None)  # an address, and of no use here
    for mark in _marks(vega):
        if mark.get("name", "").endswith("voronoi"):
            # the cell around a mark has the mark as its datum; Vega-Lite forgets it for texts
            tooltip = mark["encode"]["update"]["tooltip"]
            tooltip["signal"] = re.sub(r'(?<!datum\.)datum\["', 'datum.datum["', tooltip["signal"])
    return vega


def _marks(group: Spec) -> Iterator[Spec]:
    for mark in group.get("marks", ()):
        yield mark
        yield from _marks(mark)


@functools.cache
def library() -> str:
    """Vega with its embedder, as one script that sets `window.vegaEmbed`."""
    import vl_convert

    script: str = vl_convert.javascript_bundle(
        "window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE
    )
    # of an editor, of a tracker in an error message, of a schema: none is used, none stays
    return re.sub(r"https://(github\.com|vega\.github\.io)", "about:blank#", script)


def shown_texts(values: list[Any]) -> list[Any]:
    """Texts of the capture as they may be drawn."""
    return [visible(value, 300) if isinstance(value, str) else value for value in values]


def time_axis(times: list[float]) -> Spec:
    """A time axis in UTC whose labels are as fine as the span needs."""
    span = max(times) - min(times) if times else 0
    pattern = "%m-%d %H:%M" if span > _DAY_MS else "%H:%M:%S"
    if span < 3000:
        pattern = "%H:%M:%S.%L"
    elif span > _HOUR_MS * 3 and span <= _DAY_MS:
        pattern = "%H:%M"
    return {
        "type": "temporal",
        "scale": {"type": "utc"},
        "axis": {
            "title": None,
            "format": pattern,
            "formatType": "time",
            "tickCount": {"expr": "max(2, floor(width / 110))"},
            "labelFlush": True,
        },
    }


def series_color(field_name: str, names: list[str]) -> Spec:
    """Colours of series, in the order of the page's legend."""
    return {"field": field_name, "type": "nominal", "scale": {"domain": names}, "legend": None}


def stacked(value: str, place: str, series: str) -> Spec:
    """Lay the series of a place on one another: columns y0 and y1."""
    return {
        "stack": value,
        "groupby": [place],
        "sort": [{"field": series, "order": "ascending"}],
        "as": ["y0", "y1"],
    }


def number_axis(axis_title: str, pattern: str = ",.3~r", **scale: Any) -> Spec:
    axis: Spec = {"title": axis_title, "format": pattern}
    if pattern == ",d":
        axis["tickMinStep"] = 1
    if pattern == "~s":
        axis["labelExpr"] = "datum.value === 0 ? '0' : datum.label"  # not 0k
    found: Spec = {"type": "quantitative", "axis": axis}
    if scale:
        found["scale"] = scale
    return found


def hover(tooltip: list[Spec], x: Spec) -> Spec:
    """A rule at the nearest time, with what all series say there."""
    return {
        "params": [
            {
                "name": "hover",
                "select": {
                    "type": "point",
                    "fields": ["t"],
                    "nearest": True,
                    "on": "pointermove",
                    "clear": "pointerout",
                },
            }
        ],
        "mark": {"type": "rule", "strokeWidth": 1, "color": NEUTRAL},
        "encoding": {
            "x": {"field": "t", **x},
            "opacity": {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0},
            "tooltip": tooltip,
        },
    }


def rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def lines(fields: list[str], tooltip: list[Spec], y: Spec, times: list[float]) -> Spec:
    x = time_axis(times)
    layers: list[Spec] = [
        {
            "mark": {"type": "line", "strokeWidth": 1.6, "point": {"size": 6}},
            "encoding": {
                "x": {"field": "t", **x},
                "y": {"field": name, **y},
                "color": {
                    "datum": name,
                    "type": "nominal",
                    "scale": {"domain": fields},
                    "legend": None,
                },
            },
        }
        for name in fields
    ]
    layers[0]["params"] = [ZOOM]
    return {"layer": [*layers, hover(tooltip, x)], "height": 200}
