"""Writes ``reports/coverage.md``: every API key and version, decoded, encoded, seen in a capture.

    python reports/make_coverage.py [--captures PATH ...] [--out FILE]

Frames: Kafka's own (``../shared/kafka/vectors`` beside the checkout, where that is) and the golden
ones of ``tests/golden``. Each is decoded and compared with the values written beside it, then
encoded and compared with its bytes. Captures: ``captures/`` of the checkout, and those named.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kdissect
from kdissect.protocol.coverage import Evidence, Place, coverage_markdown

ROOT = Path(__file__).resolve().parent.parent
VECTORS = ROOT.parent / "shared" / "kafka" / "vectors" / "messages.jsonl.gz"
GOLDEN = ROOT / "tests" / "golden" / "messages.jsonl"
sys.path.insert(0, str(ROOT / "tests" / "wire"))

from message_values import to_json  # noqa: E402  (found through the line above)


def lines(path: Path) -> Iterator[dict[str, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for text in file:
            yield json.loads(text)


def check(path: Path, decoded: Counter[Place], encoded: Counter[Place]) -> str:
    """Count what a file of frames proves; says it in a sentence."""
    frames = right = same = 0
    for line in lines(path):
        frames += 1
        frame = bytes.fromhex(line["frame"])
        place = (line["api_key"], line["api_version"], line["side"])
        message = kdissect.decode_message(
            frame, side=line["side"], api_key=line["api_key"], api_version=line["api_version"]
        )
        if to_json(message.header) == line["header"] and to_json(message.body) == line["body"]:
            decoded[place] += 1
            right += 1
        if kdissect.encode_message(message) == frame:
            encoded[place] += 1
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
    sources = []
    if VECTORS.is_file():
        sources.append(f"Frames of Kafka's own writer: {check(VECTORS, decoded, encoded)}.")
    sources.append(f"Golden frames of tests/golden: {check(GOLDEN, decoded, encoded)}.")
    count = seen_in([ROOT / "captures", *options.captures], seen)
    sources.append(f"Captures: {count:,} messages decoded.")
    evidence = Evidence(tuple(sources), decoded, encoded, seen)
    options.out.write_text(coverage_markdown(evidence), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
