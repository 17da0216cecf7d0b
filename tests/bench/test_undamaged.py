"""The benchmark of undamaged captures beside an older commit: which one, and its arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import undamaged


def test_the_commit_before_hostile_captures(tmp_path: Path) -> None:
    """It is an ancestor that lacks what came next; a worktree of it is gone after its use."""
    try:
        commit = undamaged.before_hostile()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"no history here: {error}")
    with undamaged.worktree(commit, tmp_path / "old") as folder:
        assert (folder / "bench" / "product.py").exists()
        assert not (folder / undamaged.FIRST_OF_HOSTILE).exists()
        assert str(folder) in undamaged.git("worktree", "list")
    assert not folder.exists()
    assert str(folder) not in undamaged.git("worktree", "list")


def test_undamaged_captures_are_compared_by_medians_and_turns() -> None:
    """A ratio is of runs of the same turn; the marginal one of medians."""
    source = undamaged.inputs.Input("x", "a title", undamaged.inputs.START_UP)
    runs = {
        "before_1": [1.0, 1.0, 1.0], "now_1": [1.0, 1.0, 1.0], "before_5": [5.0, 10.0, 5.0],
        "now_5": [6.0, 11.0, 5.0],
    }  # fmt: skip
    made = {name: [{"seconds": one, "cpu": 2 * one} for one in run] for name, run in runs.items()}
    found = undamaged._compared(source, made)
    assert found["ratios"]["seconds"] == found["ratios"]["cpu"] == [1.1, 1.0, 1.2]
    assert found["marginal"]["seconds"] == {"before": 1.0, "now": 1.25}
