"""Write ``reports/coverage.md``: every API key and version, decoded, encoded, seen in a capture.

    python -m tools.coverage [--captures PATH ...] [--out FILE]

Frames: Kafka's own (``tests/golden/vectors``). Each is decoded and compared with the values
written beside it, then encoded and compared with its bytes.
Captures: ``captures/`` of the checkout, and those named.
"""

import argparse
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import kdissect
from kdissect.protocol import catalog, grammar
from kdissect.protocol.model import NEVER, SIDES, Api, VersionRange
from tests.codec.vectors import message_vectors, to_json

ROOT = Path(__file__).resolve().parent.parent

Place = tuple[int, int, str]  # api_key, api_version, side


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


def coverage_markdown(
    sources: Iterable[str],
    decoded_frames: Collection[Place],
    encoded_frames: Collection[Place],
    seen_messages: Mapping[Place, int],
) -> str:
    """The page: totals, then a row per API. A version counts where both of its sides do.

    sources: where the frames came from, one sentence each. decoded_frames: those that decoded to
    the values written beside them. encoded_frames: those whose values encoded back to the same
    bytes. seen_messages: counts of real captures; a request or a response makes a version seen.
    """
    rows = []
    totals = dict.fromkeys(("pairs", "decoded", "encoded", "seen"), 0)
    for api in catalog.apis().values():
        first, last = api.request.versions
        decoded = _both_sides(api, decoded_frames)
        encoded = _both_sides(api, encoded_frames)
        seen = sorted(
            {
                version
                for key, version, _ in seen_messages
                if key == api.key and version in api.request.versions  # others were only asked for
            }
        )
        messages = sum(count for (key, _, _), count in seen_messages.items() if key == api.key)
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
        "`python -m tools.coverage --captures PATH` writes this page. PATH: the recorded captures.",
        "",
        f"{len(rows)} APIs, {totals['pairs']} versions, each with a request and a response:"
        f" {totals['decoded']} decoded, {totals['encoded']} encoded,"
        f" {totals['seen']} seen in real captures.",
        "",
        *(f"- {source}" for source in sources),
        "",
        "| key | api | versions | drafts | decoded | encoded | seen | messages seen |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def check(decoded: Counter[Place], encoded: Counter[Place]) -> str:
    """Count what Kafka's frames prove; says it in a sentence."""
    frames = right = same = 0
    for (api_key, side), vectors in message_vectors().items():
        for vector in vectors:
            frames += 1
            frame, version = vector["frame"], vector["api_version"]
            message = kdissect.decode_message(
                frame, side=side, api_key=api_key, api_version=version
            )
            header, body = to_json(message.header), to_json(message.body)
            if (header, body) == (vector["header"], vector["body"]):
                decoded[api_key, version, side] += 1
                right += 1
            if kdissect.encode_message(message) == frame:
                encoded[api_key, version, side] += 1
                same += 1
    return f"{right} of {frames} decoded to the expected values, {same} encoded to the same bytes"


def seen_in(paths: list[Path], seen: Counter[Place]) -> int:
    """Count the messages of captures that were decoded; returns how many."""
    table = kdissect.read(paths).exchanges.to_arrow()
    keys, versions = table["api_key"].to_pylist(), table["api_version"].to_pylist()
    for side in ("request", "response"):
        statuses = table[f"{side}_decode_status"].to_pylist()
        for key, version, status in zip(keys, versions, statuses, strict=True):
            if status == "ok" and key is not None and version is not None:
                seen[key, version, side] += 1
    return sum(seen.values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes reports/coverage.md.")
    parser.add_argument("--captures", type=Path, nargs="+", default=[], help="more captures")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "coverage.md")
    options = parser.parse_args()
    decoded: Counter[Place] = Counter()
    encoded: Counter[Place] = Counter()
    seen: Counter[Place] = Counter()
    sources = [f"Frames of Kafka's own writer: {check(decoded, encoded)}."]
    count = seen_in([ROOT / "captures", *options.captures], seen)
    sources.append(f"Captures: {count:,} messages decoded.")
    options.out.write_text(coverage_markdown(sources, decoded, encoded, seen), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
