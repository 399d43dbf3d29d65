"""The file of results: what a kill leaves of a line is no line, and the next one takes its place."""

import json
from pathlib import Path

import pytest
from small_studies import result_of, study_of

from kernelwarehouse.errors import StudyError
from kernelwarehouse.study.jobs import trial_jobs
from kernelwarehouse.study.results import Result, append_result, read_results, refuse_mixed_data


@pytest.fixture
def results(tmp_path: Path) -> list[Result]:
    study = study_of(tmp_path)
    [first, second] = trial_jobs(study, study.methods[0], {}) or []
    return [result_of(first, 0.25), result_of(second, None)]


def test_lines_come_back_as_they_were(results: list[Result], tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for result in results:
        append_result(path, result)
    assert read_results(path) == results
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("length", [1, 40, -2])
def test_a_torn_line_is_no_line_and_makes_room_for_the_next(results: list[Result], tmp_path: Path, length: int) -> None:
    path = tmp_path / "results.jsonl"
    append_result(path, results[0])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:length])
    assert read_results(path) == results[:1]
    append_result(path, results[1])
    assert read_results(path) == results
    assert path.read_bytes().startswith(whole + b'{"method"')


def test_a_torn_line_alone(results: list[Result], tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"method": "sta')
    assert read_results(path) == []
    append_result(path, results[0])
    assert read_results(path) == results[:1]


def test_a_line_whose_end_is_gone_is_kept(results: list[Result], tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_result(path, results[0])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert read_results(path) == results[:1]
    append_result(path, results[1])
    assert read_results(path) == results


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 of .*results\.jsonl is damaged"),
        ("7", "line 2 of .* is no result: its method is None; remove the line to go on without it"),
        (json.dumps({"method": "static", "phase": 3}), "line 2 of .* is no result: its phase is 3"),
        (json.dumps({"method": "static", "phase": "trial"}), "line 2 of .* is no result: its seed is None"),
    ],
)
def test_damaged_lines_are_named(results: list[Result], tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "results.jsonl"
    append_result(path, results[0])
    path.write_text(f"{path.read_text()}{line}\n{path.read_text()}")
    with pytest.raises(StudyError, match=message):
        read_results(path)


def test_no_results_are_told(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"none\.jsonl cannot be read \(No such file.*study run' writes them"):
        read_results(tmp_path / "none.jsonl")


def test_results_of_different_images_are_not_mixed(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    [job, _] = trial_jobs(study, study.methods[0], {}) or []
    results = [result_of(job, 0.5, data=digest) for digest in ("d1", "d2")]
    refuse_mixed_data(results[:1], tmp_path / "r.jsonl")
    refuse_mixed_data(results[:1], tmp_path / "r.jsonl", "d1")
    refuse_mixed_data([], tmp_path / "r.jsonl", "d1")
    for arguments in ((results, tmp_path / "r.jsonl"), (results[:1], tmp_path / "r.jsonl", "d2")):
        with pytest.raises(StudyError, match=r"not all of the same images \(there are d1, d2"):
            refuse_mixed_data(*arguments)
