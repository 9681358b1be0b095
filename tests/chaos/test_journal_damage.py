"""A few trials of `journal_damage.py`; `python -m tests.chaos journal-damage` runs many."""

from pathlib import Path

import pytest

from tests.chaos.journal_damage import run_trials, summary


@pytest.mark.slow
def test_damage_to_journal_and_checkpoint_is_harmless_or_raises(tmp_path: Path) -> None:
    result = summary(run_trials(24, 13, tmp_path), 13)
    assert result["failures"] == []
    assert result["outcomes"]["raised"] > 8
