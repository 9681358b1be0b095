"""A few trials of `artefact_damage.py`; `python -m tests.chaos artefact-damage` runs many."""

from pathlib import Path

from tests.chaos.artefact_damage import run_trials, summary


def test_a_flipped_bit_in_any_file_that_is_read_again_is_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    result = summary(run_trials(150, 13, tmp_path), 13)
    assert result["failures"] == []
    assert result["outcomes"]["raised"] > 130
