"""Tables and the picture, from results that were made up so that everything can be counted by hand."""

import csv
import io
import math
import re
from pathlib import Path

import pytest
from matplotlib.image import imread
from small_studies import WHOLE, result_of, results_of, study_of, twice_as_long, write_study

from kernelwarehouse.cli import main
from kernelwarehouse.errors import StudyError
from kernelwarehouse.study.jobs import by_key, final_jobs
from kernelwarehouse.study.results import Result, append_result
from kernelwarehouse.study.spec import Study
from kernelwarehouse.study.table import as_csv, as_markdown, as_text, make_rows, placed

THREE = WHOLE.replace("seeds = [0, 1]", "seeds = [0, 1, 2]")


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return study_of(tmp_path, THREE)


@pytest.fixture
def results(study: Study) -> list[Result]:
    """The twin lacks its third seed, the upgrade was not begun."""
    static = results_of(study, "static", [0.5, 0.6], [0.70, 0.72, 0.71])
    return results_of(study, "twin", [0.65, None], [0.73, 0.74], static)


def test_figures_are_those_by_hand(study: Study, results: list[Result]) -> None:
    static, twin, upgraded = make_rows(study, by_key(results))
    assert static.setting == (0.05, 0.0005)
    assert (static.parameters, static.minutes, static.seeds) == (1000, 2.0, "3")
    assert static.accuracy.mean == pytest.approx(71)
    assert static.accuracy.deviation == pytest.approx(1)
    assert static.difference is None
    assert (twin.setting, twin.seeds) == ((0.01, 0.0005), "2 of 3")
    # Over seeds 0 and 1: +3 and +2. Deviation sqrt(0.5), t of one degree of freedom 12.706.
    assert twin.difference.count == 2
    assert twin.difference.mean == pytest.approx(2.5)
    assert twin.difference.interval == pytest.approx(12.706 * math.sqrt(0.5) / math.sqrt(2), abs=1e-3)
    assert twin.paper_difference == pytest.approx(4.5)
    assert twin.trials == {(0.01, 0.0005): pytest.approx(65), (0.05, 0.0005): None}
    assert (upgraded.setting, upgraded.parameters, upgraded.accuracy, upgraded.difference) == (None,) * 4
    assert upgraded.trials == {}


def test_markdown_has_empty_cells_for_what_was_not_run(study: Study, results: list[Result]) -> None:
    lines = as_markdown(study, make_rows(study, by_key(results))).splitlines()
    assert lines[2] == "| static | 1,000 | 0.05 | 0.0005 | 2.0 | 3 | 71.00 ± 1.00 |  | 70.00 |  |"
    assert lines[3] == "| twin | 1,000 | 0.01 | 0.0005 | 2.0 | 2 of 3 | 73.50 ± 0.71 | +2.50 ± 6.35 | 74.50 | +4.50 |"
    assert lines[4] == "| upgraded |  |  |  |  |  |  |  |  |  |"
    assert "Paper, and its difference to static: of a larger network." in lines[6]
    assert lines[8] == "| method | 0.01 / 0.0005 | 0.05 / 0.0005 |"
    assert lines[10] == "| static | 50.00 | **60.00** |"
    assert lines[11] == "| twin | **65.00** | diverged |"
    assert lines[12] == "| upgraded |  |  |"
    assert "on the 16 training images kept apart" in lines[14]
    assert lines[14].endswith("a better one may lie outside: static; twin.")


def test_nothing_at_all_is_a_table_too(study: Study) -> None:
    lines = as_markdown(study, make_rows(study, {})).splitlines()
    assert lines[2] == "| static |  |  |  |  |  |  |  | 70.00 |  |"
    assert lines[10] == "| static |  |  |"
    assert "upgraded" in as_text(study, make_rows(study, {}))


def test_a_final_run_that_diverged_is_told_and_not_averaged(study: Study, results: list[Result]) -> None:
    [_, _, third] = final_jobs(study, study.method("twin"), by_key(results))
    [_, twin, _] = make_rows(study, by_key([*results, result_of(third, None)]))
    assert twin.seeds == "2 of 3, 1 diverged"
    assert twin.accuracy.mean == pytest.approx(73.5)


def test_minutes_of_an_upgrade_have_those_before_it(study: Study, results: list[Result]) -> None:
    results = results_of(study, "upgraded", [0.5, 0.5], [0.75], results)
    [final] = final_jobs(study, study.method("upgraded"), by_key(results))
    assert make_rows(study, by_key(results))[2].minutes is None
    assert make_rows(study, by_key([*results, result_of(final.base, 0.5, seconds=60.0)]))[2].minutes == 3


def test_csv_has_every_figure_unrounded(study: Study, results: list[Result]) -> None:
    static, twin, upgraded, *trials = csv.DictReader(io.StringIO(as_csv(make_rows(study, by_key(results)))))
    kept_apart = [(each["method"], float(each["learning_rate"]), each["trial_accuracy"]) for each in trials]
    assert kept_apart[0] == ("static", 0.01, "50.0")
    assert len(trials) == sum(result.phase == "trial" for result in results)
    assert float(static["test_accuracy_deviation"]) == pytest.approx(1)
    assert (twin["model"], twin["seeds"], twin["pairs"]) == ("kw1x_resnet18", "2", "2")
    assert float(twin["difference_interval"]) == pytest.approx(6.3531, abs=1e-4)
    assert (upgraded["parameters"], upgraded["test_accuracy_mean"], upgraded["paper"]) == ("", "", "")


def test_tables_go_between_the_marks_of_a_page() -> None:
    page = "before\n<!-- study -->\nold\n<!-- /study -->\nafter\n"
    assert placed(page, "new \\1\n", "any") == "before\n<!-- study -->\nnew \\1\n<!-- /study -->\nafter\n"
    assert placed(placed(page, "new\n", "any"), "newer\n", "any") == placed(page, "newer\n", "any")
    assert placed("no marks", "new\n", "any") == placed(None, "new\n", "any") == "new\n"


def test_a_page_of_several_studies_has_a_place_for_each() -> None:
    page = "".join(f"<!-- study: {name} -->\nold\n<!-- /study: {name} -->\n" for name in ("one", "two"))
    assert placed(page, "new\n", "two") == page[: page.rindex("old")] + "new" + page[page.rindex("old") + 3 :]
    assert placed(placed(page, "new\n", "one"), "new\n", "two") == page.replace("old", "new")
    with pytest.raises(StudyError, match="no place for the table of 'three'; write <!-- study: three -->"):
        placed(page, "new\n", "three")
    assert placed("<!-- study -->\nold\n<!-- /study -->\n" + page, "new\n", "three").count("old") == 2
    for broken in ("<!-- study: one -->\nold\n", "<!-- /study: one -->\nold\n<!-- study: one -->\n"):
        with pytest.raises(StudyError, match="'one'"):
            placed(broken, "new\n", "one")


def test_the_command_writes_all_of_it(
    study: Study, results: list[Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(tmp_path, THREE)
    for result in results:
        append_result(path.with_suffix(".jsonl"), result)
    page, picture = tmp_path / "page.md", tmp_path / "plot.png"
    page.write_text("# Study\n<!-- study -->\n<!-- /study -->\n")
    words = f"study table {path} --markdown {page} --csv {tmp_path / 'all.csv'} --plot {picture}"
    assert main(words.split()) == 0
    shown = capsys.readouterr()
    assert "+2.50 ± 6.35" in shown.out
    assert shown.err == ""
    assert page.read_text().startswith("# Study\n<!-- study -->\n| method | params |")
    assert (tmp_path / "all.csv").read_text().startswith("method,model,")
    pixels = imread(picture)
    assert pixels.shape[0] > 100
    assert 0.02 < (pixels[..., :3].min(-1) < 0.9).mean() < 0.5  # ink, and not only that
    blue = (pixels[..., 2] > 0.6) & (pixels[..., 0] < 0.3)
    assert blue.sum() > 50  # the twin's marks


def test_differences_to_another_method_than_the_baseline(
    results: list[Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(tmp_path, THREE)
    for result in results:
        append_result(path.with_suffix(".jsonl"), result)
    assert main(["study", "table", str(path), "--to", "twin"]) == 0
    shown = capsys.readouterr().out
    assert "to twin" in shown
    assert "-2.50 ± 6.35" in shown
    assert "+2.50" not in shown


def test_the_command_finds_the_place_of_its_study(results: list[Result], tmp_path: Path) -> None:
    path = write_study(tmp_path, THREE)
    for result in results:
        append_result(path.with_suffix(".jsonl"), result)
    page = tmp_path / "page.md"
    both = "".join(f"<!-- study: {name} -->\n<!-- /study: {name} -->\n" for name in ("other", path.stem))
    page.write_text(both)
    assert main(["study", "table", str(path), "--markdown", str(page)]) == 0
    other, own = page.read_text().split("<!-- /study: other -->\n")
    assert other == "<!-- study: other -->\n"
    assert own.startswith(f"<!-- study: {path.stem} -->\n| method | params |")
    page.write_text(both.replace(path.stem, "another"))
    assert main(["study", "table", str(path), "--markdown", str(page)]) == 2
    assert page.read_text() == both.replace(path.stem, "another")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("study", "required: run|table"),
        ("study table", "required: STUDY"),
        ("study table {study} --results {missing}", "cannot be read (No such file or directory)"),
        ("study table {missing}", "cannot be read as TOML"),
        ("study table {study} --results {empty} --plot {folder}/p.png", "no network of the study was tested yet"),
        ("study table {study} --results {empty} --plot {folder}/p.txt", "has no known format"),
        ("study table {study} --results {empty} --csv {missing}/t.csv", "cannot be written"),
        (
            "study table {study} --results {empty} --to twins",
            "baseline (='twins') must be one of the methods, static, twin",
        ),
        ("study run {study} --data {missing} --output {folder}", "is not there: expected 'embedded', an .npz"),
        ("study run {study} --data embedded --output {folder}", "kept (=16) must be a multiple of the 10 classes"),
        ("study run {study} --data embedded --output {empty}", "cannot be made a folder for the study"),
        ("study run {study} --data {striped} --output {folder} --processes 0", "--processes (=0) must be at least 1"),
        ("study run {study} --data {striped} --output {folder} --results {folder}", "a file name in a directory"),
    ],
)
def test_bad_commands_say_what_would_be_right(
    tmp_path: Path, striped_npz: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    places = {"study": write_study(tmp_path), "missing": tmp_path / "missing", "empty": tmp_path / "empty.jsonl"}
    places["empty"].touch()
    (tmp_path / "folder").mkdir()
    filled = words.format(**places, folder=tmp_path / "folder", striped=striped_npz)
    assert main(filled.split()) == 2
    assert message in capsys.readouterr().err


def test_unused_results_are_told(
    study: Study, results: list[Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(tmp_path, twice_as_long(THREE))
    for result in results:
        append_result(tmp_path / "r.jsonl", result)
    assert main(f"study table {path} --results {tmp_path / 'r.jsonl'}".split()) == 0
    assert "5 results in" in capsys.readouterr().err


def test_a_study_that_only_tries_shows_and_draws_its_trials(
    results: list[Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(tmp_path, re.sub(r"seeds = \[.+\]", "seeds = []", THREE))
    page, picture = tmp_path / "page.md", tmp_path / "plot.png"
    words = f"study table {path} --markdown {page} --plot {picture}".split()
    path.with_suffix(".jsonl").touch()
    assert main(words) == 2
    assert "no trial of the study was run yet" in capsys.readouterr().err
    for result in results:
        append_result(path.with_suffix(".jsonl"), result)
    assert main(words) == 0
    assert "test (%)" not in page.read_text()
    assert "50.00" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
