"""A study of seconds, and results for it that nobody had to train."""

from pathlib import Path
from typing import Any

from kernelwarehouse.study.jobs import Job, by_key, final_jobs, trial_jobs
from kernelwarehouse.study.results import Result
from kernelwarehouse.study.spec import Study, load_study

HEAD = """
title = "Stripes"
data = "striped.npz"
kept = 16
recipe = "small"
epochs = 4
paper_note = "of a larger network"

[overrides]
batch_size = 16
flip = 0.0
crop = "none"
warmup_epochs = 0.5
tau_epochs = 0.5

[tuning]
learning_rates = [0.01, 0.05]
weight_decays = [0.0005]
seed = 9
epochs = 2
"""
STATIC = """
[[methods]]
name = "static"
model = "resnet18"
model_args = { channels = [8, 8, 16, 16], layers = [1, 1, 1, 1] }
seeds = [0, 1]
paper = 70.0
"""
TWIN = """
[[methods]]
name = "twin"
model = "kw1x_resnet18"
model_args = { channels = [8, 8, 16, 16], layers = [1, 1, 1, 1] }
seeds = [0, 1]
paper = 74.5
"""
UPGRADED = """
[[methods]]
name = "upgraded"
model = "kw1x_resnet18"
model_args = { channels = [8, 8, 16, 16], layers = [1, 1, 1, 1] }
upgrade_from = "static"
upgrade_after = 2
seeds = [0]
"""
WHOLE = HEAD + STATIC + TWIN + UPGRADED


def twice_as_long(text: str) -> str:
    """The study with other final runs, and the same trials."""
    return text.replace("epochs = 4", "epochs = 8").replace("upgrade_after = 2", "upgrade_after = 4")


def write_study(folder: Path, text: str = WHOLE) -> Path:
    path = folder / "stripes.toml"
    path.write_text(text)
    return path


def study_of(folder: Path, text: str = WHOLE) -> Study:
    return load_study(write_study(folder, text))


def result_of(job: Job, accuracy: float | None, test: float | None = None, **changes: Any) -> Result:
    """As if the job had been run; without an accuracy it diverged."""
    values: dict[str, Any] = {
        "method": job.method,
        "phase": job.phase,
        "seed": job.seed,
        "learning_rate": job.recipe.learning_rate,
        "weight_decay": job.recipe.weight_decay,
        "accuracies": (0.1, accuracy or 0.1),
        "accuracy": accuracy,
        "test_accuracy": test,
        "diverged": accuracy is None,
        "parameters": 1000,
        "seconds": 120.0,
        "commit": "abc",
        "machine": "a machine",
        "data": "d1",
        "settings": job.settings,
    }
    return Result(**values | changes)


def results_of(
    study: Study, method: str, trials: list[float | None], tests: list[float], known: list[Result] | None = None
) -> list[Result]:
    """Results of all trials of a method, and of the final runs of its first seeds."""
    results = list(known or [])
    jobs = trial_jobs(study, study.method(method), by_key(results)) or []
    results += [result_of(job, accuracy) for job, accuracy in zip(jobs, trials, strict=True)]
    finals = final_jobs(study, study.method(method), by_key(results)) or []
    return results + [result_of(job, 0.5, test) for job, test in zip(finals, tests, strict=False)]
