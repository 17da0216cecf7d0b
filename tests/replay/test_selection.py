"""replay chooses requests by the options that `show` has, from captures and saved files."""

from pathlib import Path

import pytest

import kdissect
from kdissect.api import selected
from kdissect.pipeline.selection import Selection
from kdissect.replay.model import PlanOptions
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.workload.saved_file import save
from kdissect.replay.workload.source import load_workload
from tests.conftest import CAPTURES

PATH = CAPTURES / "librdkafka.pcap"


def sent_exchanges(path: Path, *clients: str) -> set[int]:
    options = PlanOptions(selection=Selection(clients=clients))
    steps = make_plan(load_workload(path), options).steps
    return {step.exchange.exchange_id for step in steps if step.skipped is None}


@pytest.mark.parametrize("client", ["RD-C?", "127.0.0.1:44660"])
def test_the_same_requests_as_in_the_table(client: str, tmp_path: Path) -> None:
    """The plan skips the others, of a capture and of a saved file."""
    saved = tmp_path / "x.replay"
    save(load_workload(PATH), str(saved))
    tables = kdissect.read(PATH)
    chosen = selected(tables, Selection(clients=(client,))).exchanges
    expected = set(chosen.to_arrow()["exchange_id"].to_pylist())
    for source in (PATH, saved):
        all_sent = sent_exchanges(source)
        assert sent_exchanges(source, client) == all_sent & expected < all_sent
