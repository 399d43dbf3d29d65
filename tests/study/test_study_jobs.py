"""Which runs a study wants, from what it has."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from small_studies import WHOLE, result_of, results_of, study_of, twice_as_long

from kernelwarehouse.study.jobs import best_setting, by_key, final_jobs, key_of, plan_jobs, tell_unused, trial_jobs


def test_trials_come_first_and_the_rest_waits(tmp_path: Path) -> None:
    plan = plan_jobs(study_of(tmp_path), {})
    assert [(job.method, job.phase, job.seed, job.recipe.learning_rate, job.epochs) for job in plan.jobs] == [
        (method, "trial", 9, rate, 2) for method in ("static", "twin") for rate in (0.01, 0.05)
    ]
    assert plan.waiting == [
        *[("static", 4)] * 2,
        *[("twin", 4)] * 2,
        *[("upgraded", 1)] * 2,
        ("upgraded", 2),
    ]


def test_final_runs_have_the_best_setting(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    found = by_key(results_of(study, "twin", [0.5, 0.6], []))
    assert best_setting(study, study.method("twin"), found) == (0.05, 0.0005)
    finals = final_jobs(study, study.method("twin"), found)
    assert finals is not None
    assert [(job.seed, job.recipe.learning_rate, job.epochs, job.base) for job in finals] == [
        (0, 0.05, 4, None),
        (1, 0.05, 4, None),
    ]


@pytest.mark.parametrize(
    ("trials", "rate"), [([0.5, 0.5], 0.01), ([None, 0.1], 0.05), ([0.0, None], 0.01), ([None, None], None)]
)
def test_the_first_of_equals_is_best_and_diverged_ones_are_not(
    tmp_path: Path, trials: list[float | None], rate: float | None
) -> None:
    study = study_of(tmp_path)
    setting = best_setting(study, study.method("twin"), by_key(results_of(study, "twin", trials, [])))
    assert (setting and setting[0]) == rate


def test_upgrades_begin_with_a_shorter_run_of_the_same_seed_and_its_methods_best_setting(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    results = results_of(study, "static", [0.5, 0.6], [])
    trials = trial_jobs(study, study.method("upgraded"), by_key(results))
    assert trials is not None
    [base] = {job.base.key: job.base for job in trials}.values()
    assert (base.method, base.phase, base.seed, base.model) == ("static", "base", 9, "resnet18")
    assert (base.epochs, base.recipe.learning_rate) == (1, 0.05)
    assert [(job.epochs, job.recipe.learning_rate) for job in trials] == [(1, 0.01), (1, 0.05)]
    results = results_of(study, "upgraded", [0.7, 0.6], [], results)
    [final] = final_jobs(study, study.method("upgraded"), by_key(results))
    assert (final.seed, final.epochs, final.recipe.learning_rate) == (0, 2, 0.01)
    assert (final.base.seed, final.base.epochs, final.base.recipe.learning_rate) == (0, 2, 0.05)


def test_keys_survive_the_file_and_tell_every_setting_apart(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    jobs = plan_jobs(study, {}).jobs
    lines = [json.loads(json.dumps(asdict(result_of(job, 0.5)))) for job in jobs]
    assert [key_of(line["phase"], line["settings"]) for line in lines] == [job.key for job in jobs]
    assert len({job.key for job in jobs}) == len(jobs)
    job = jobs[0]
    for change in (
        {"phase": "final"},
        {"seed": 5},
        {"model": "resnet34"},
        {"model_args": {}},
        {"recipe": job.recipe.with_overrides({"flip": 0.5})},
        {"split": {"kept": 16, "seed": 1}},
        {"base": jobs[1]},
    ):
        assert replace(job, **change).key != job.key
    assert replace(job, method="renamed", recipe=job.recipe.with_overrides({"summary": "x"})).key == job.key


def test_a_changed_study_leaves_results_unused_and_takes_them_back(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    found = by_key(results_of(study, "static", [0.6, 0.5], [0.4, 0.5]))
    path = tmp_path / "r.jsonl"
    assert tell_unused(study, found, path) == ""
    longer = study_of(tmp_path, twice_as_long(WHOLE))
    assert tell_unused(longer, found, path).startswith(f"2 results in {path} are of other settings")
    more = study_of(tmp_path, WHOLE.replace("[0.01, 0.05]", "[0.01, 0.02, 0.05]"))
    assert tell_unused(more, found, path).startswith("2 results")  # it is not known yet whether 0.01 is still the best
    [missing] = [job for job in trial_jobs(more, more.method("static"), found) if job.key not in found]
    assert not tell_unused(more, {**found, missing.key: result_of(missing, 0.1)}, path)
