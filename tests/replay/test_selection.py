"""replay chooses requests by the options that `show` has, from any kind of source."""

import dataclasses
from pathlib import Path

import pytest

import kdissect
from kdissect.errors import CaptureError
from kdissect.pipeline.selection import ConnectionName, Selection
from kdissect.replay.model import Workload
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.workload.saved_file import save
from kdissect.replay.workload.source import load_workload
from tests.conftest import CAPTURES

PATH = CAPTURES / "librdkafka.pcap"


@pytest.fixture(scope="module")
def tables() -> kdissect.Tables:
    """The tables of the capture, with payload."""
    return kdissect.read(PATH, reveal_secrets=True)


@pytest.fixture(scope="module")
def unselected(
    tables: kdissect.Tables, tmp_path_factory: pytest.TempPathFactory
) -> dict[Path, set[int]]:
    """The capture and its table set, each with the exchanges that a whole replay sends."""
    folder = tmp_path_factory.mktemp("selection") / "tables"
    tables.write(folder)
    return {source: sent_exchanges(load_workload(source)) for source in (PATH, folder)}


@pytest.mark.parametrize(
    "selection",
    [
        Selection(errors=True, clients=("RD-C?",)),
        Selection(slow_ms=20),
        Selection(where="request_size > 100 and api_name <> 'Fetch'"),
        Selection(connections=(ConnectionName.of("127.0.0.1:44660"),)),
    ],
    ids=["errors", "slow", "where", "connection"],
)
def test_the_same_requests_as_in_the_table(
    selection: Selection, tables: kdissect.Tables, unselected: dict[Path, set[int]]
) -> None:
    """From a capture and from its table set; the plan skips the others."""
    expected = set(tables.select(selection).exchanges.to_arrow()["exchange_id"].to_pylist())
    assert 0 < len(expected) < tables.exchanges.num_rows
    for source, sent in unselected.items():
        workload = load_workload(source, selection=selection)
        assert workload.chosen == expected
        assert sent_exchanges(workload) == sent & expected


def sent_exchanges(workload: Workload) -> set[int]:
    steps = make_plan(workload).steps
    return {step.exchange.exchange_id for step in steps if step.skipped is None}


def test_a_saved_file(tmp_path: Path) -> None:
    """It knows who sent a request; columns that it has not are refused."""
    path = tmp_path / "x.replay"
    save(load_workload(PATH), str(path))
    selection = Selection(clients=("RD-C?",))
    captured = load_workload(PATH, selection=selection)
    assert (
        sent_exchanges(load_workload(path, selection=selection))
        == sent_exchanges(captured)
        != set()
    )
    for wrong in (Selection(errors=True), Selection(slow_ms=1), Selection(where="true")):
        with pytest.raises(CaptureError, match="need a capture or a table set"):
            load_workload(path, selection=dataclasses.replace(selection, **chosen_options(wrong)))


def chosen_options(selection: Selection) -> dict[str, object]:
    return {
        name: getattr(selection, name)
        for name in ("errors", "slow_ms", "where")
        if getattr(selection, name)
    }
