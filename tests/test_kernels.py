"""Every kernel has a plain definition, and a test that compares the two."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MARKS = ("kernel", "making_kernel")

# Module with kernels -> (module with their definitions, test that compares them).
TWINS = {
    "capture.fragments": ("capture.link_reference", "capture/test_layers.py"),
    "capture.pick": ("capture.packets_reference", "extract/test_extract.py"),
    "capture.scan": ("capture.link_reference", "capture/test_layers.py"),
    "capture.source": (None, "capture/test_source.py"),  # copies: slices of bytes define them
    "capture.split": ("capture.packets_reference", "capture/test_formats.py"),
    "packing": (None, "test_packing.py"),  # numpy's .T
    "pipeline.facts": ("pipeline.facts_reference", "pipeline/test_client_ids.py"),
    "stream.acks": ("stream.acks_reference", "stream/test_framing.py"),
    "stream.evidence": ("stream.evidence_reference", "stream/test_framing.py"),
    "stream.frame_rows": ("stream.framing_reference", "stream/test_framing.py"),
    "stream.framing": ("stream.framing_reference", "stream/test_framing.py"),
    "stream.laying": ("stream.reassembly_reference", "stream/test_reassembly.py"),
    "stream.lone": ("stream.lone_reference", "stream/test_lone.py"),
    "stream.paired": (None, "stream/test_transcripts.py"),  # a join of columns
    "stream.pairing": ("stream.pairing_reference", "stream/test_pairing.py"),
    "stream.pieces": ("stream.pieces_reference", "stream/test_framing.py"),
    "stream.reassembly": ("stream.reassembly_reference", "stream/test_reassembly.py"),
    "stream.placing": ("stream.placing_reference", "stream/test_placing.py"),
    "stream.recognise": ("stream.recognise_reference", "stream/test_recognise.py"),
    "stream.sasl_evidence": ("stream.sasl_evidence_reference", "stream/test_framing.py"),
    "stream.tls_records": ("stream.tls_records_reference", "stream/test_tls_records.py"),
    "tables.values": ("tables.values_reference", "tables/test_values.py"),
    "wire.body_kernel": ("wire.reference", "wire/test_body_faults.py"),
    "wire.records_kernel": ("wire.records_reference", "wire/test_records.py"),
    "wire.text_kernel": ("wire.reference", "wire/test_body_presence.py"),
}


def modules_with_kernels() -> set[str]:
    found = set()
    for path in (ROOT / "kdissect").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(mark, ast.Name) and mark.id in MARKS for mark in node.decorator_list
            ):
                found.add(".".join(path.relative_to(ROOT / "kdissect").with_suffix("").parts))
    return found


def test_every_kernel_has_a_definition_and_a_test() -> None:
    assert modules_with_kernels() == set(TWINS)
    for twin, test in TWINS.values():
        text = (ROOT / "tests" / test).read_text("utf-8")
        if twin is not None:
            importlib.import_module(f"kdissect.{twin}")
            assert twin.split(".")[1] in text, (twin, test)
