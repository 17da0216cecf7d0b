"""The coverage page: what was decoded, encoded and seen, for every API key and version.

A pure function from evidence to Markdown. The evidence is gathered by ``reports/make_coverage.py``,
which decodes and reads captures; this package says what there is to cover.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kdissect.protocol import catalog, grammar
from kdissect.protocol.model import NEVER, Api, VersionRange

Place = tuple[int, int, str]  # api_key, api_version, side
SIDES = ("request", "response")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of each (api_key, api_version, side).

    sources: where the frames came from, one sentence each. decoded: frames that decoded to the
    values written beside them. encoded: frames whose values encoded back to the same bytes.
    seen: messages in real captures.
    """

    sources: tuple[str, ...]
    decoded: Mapping[Place, int] = field(default_factory=dict)
    encoded: Mapping[Place, int] = field(default_factory=dict)
    seen: Mapping[Place, int] = field(default_factory=dict)


def versions_text(versions: Iterable[int]) -> str:
    """Versions as ranges: ``0-3, 5``; ``-`` where there are none."""
    ranges: list[VersionRange] = []
    for version in sorted(set(versions)):
        if ranges and ranges[-1].last == version - 1:
            ranges[-1] = VersionRange(ranges[-1].first, version)
        else:
            ranges.append(VersionRange(version, version))
    return ", ".join(map(grammar.format_range, ranges)) or "-"


def _both_sides(api: Api, found: Collection[Place]) -> list[int]:
    first, last = api.request.versions
    return [
        version
        for version in range(first, last + 1)
        if all((api.key, version, side) in found for side in SIDES)
    ]


def coverage_markdown(evidence: Evidence) -> str:
    """The page: totals, then a row per API. A version counts where both of its sides do.

    Seen counts a version where a request or a response of it was in a capture.
    """
    rows = []
    totals = dict.fromkeys(("pairs", "decoded", "encoded", "seen"), 0)
    for api in catalog.apis().values():
        first, last = api.request.versions
        decoded = _both_sides(api, evidence.decoded)
        encoded = _both_sides(api, evidence.encoded)
        seen = sorted(
            {
                version
                for key, version, _ in evidence.seen
                if key == api.key and version in api.request.versions  # others were only asked for
            }
        )
        messages = sum(count for (key, _, _), count in evidence.seen.items() if key == api.key)
        totals["pairs"] += last - first + 1
        totals["decoded"] += len(decoded)
        totals["encoded"] += len(encoded)
        totals["seen"] += len(seen)
        drafts = "" if api.request.unstable == NEVER else grammar.format_range(api.request.unstable)
        cells = [
            str(api.key),
            api.name,
            versions_text(range(first, last + 1)),
            drafts,
            versions_text(decoded),
            versions_text(encoded),
            versions_text(seen),
            f"{messages:,}" if messages else "",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    lines = [
        "# Coverage",
        "",
        f"{len(rows)} APIs, {totals['pairs']} versions, each with a request and a response:"
        f" {totals['decoded']} decoded, {totals['encoded']} encoded,"
        f" {totals['seen']} seen in real captures.",
        "",
        *(f"- {source}" for source in evidence.sources),
        "",
        "| key | api | versions | drafts | decoded | encoded | seen | messages seen |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"
