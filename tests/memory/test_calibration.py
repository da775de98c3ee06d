"""The calibration file: what is written is read back, with its errors; what is no such file is refused."""

import json

import pytest

from leantune.errors import InvalidArgumentError
from leantune.memory.reports.calibration import CALIBRATION_FILE, calibration, read_calibration
from leantune.memory.reports.stages import STEP, TOTAL, StageMeasurement, stage_rows

PLANNED = {STEP: {"weights": 100, "gradients": 50, "total": 150}, "forward": {"total": 90}}
MEASURED = [
    StageMeasurement(STEP, {"weights": 100, "gradients": 60}, part_peaks={"weights": 100, "gradients": 64}),
    StageMeasurement("forward", {"weights": 100}),
    StageMeasurement("save", {"weights": 100}),
]


def found():
    rows = stage_rows(PLANNED, MEASURED)
    return calibration(
        rows, machine={"device": "cpu"}, versions={"torch": "2"}, run={"where": "2 x 8"}, beside_tensors=7
    )


def test_rows_put_plan_beside_measurement_part_by_part():
    rows = {(row.stage, row.part): row for row in stage_rows(PLANNED, MEASURED)}
    assert (rows[STEP, "gradients"].planned, rows[STEP, "gradients"].measured) == (50, 60)  # at the stage's peak
    assert rows[STEP, TOTAL].measured == 160
    assert rows["save", TOTAL].planned is None
    assert list(dict.fromkeys(stage for stage, _ in rows)) == ["forward", STEP, "save"]


def test_p1_a_calibration_is_read_back_with_its_errors(tmp_path):
    made = found()
    assert made.save(tmp_path) == tmp_path / CALIBRATION_FILE
    again = read_calibration(tmp_path)
    assert again == made
    assert again.ratio(STEP) == 160 / 150 and again.ratio(STEP, "gradients") == 60 / 50
    assert again.ratio("save") is None  # measured, never planned
    assert again.worst_error == pytest.approx(0.1)
    assert again.median_error == pytest.approx((0.1 + 10 / 160) / 2)
    stated = json.loads((tmp_path / CALIBRATION_FILE).read_text())
    assert stated["worst_error"] == again.worst_error


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "rows": [{}]}'])
def test_what_is_no_calibration_is_refused(tmp_path, text):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match="leantune profile"):
        read_calibration(path)
    with pytest.raises(InvalidArgumentError):
        read_calibration(tmp_path / "absent.json")
