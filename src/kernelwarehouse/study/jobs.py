"""From a study and the results so far to the runs that are to be made."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kernelwarehouse.study.results import Result
from kernelwarehouse.study.spec import Method, Phase, Study
from kernelwarehouse.training.recipe import Recipe

Found = Mapping[str, Result]
"""Results by the key of their job."""


@dataclass(frozen=True)
class Job:
    """One run of the training engine. `split` says which images were kept apart, `base` is the run whose network this
    one begins with."""

    method: str
    phase: Phase
    seed: int
    model: str
    model_args: Mapping[str, Any]
    recipe: Recipe
    split: Mapping[str, int]
    base: "Job | None" = None

    @property
    def epochs(self) -> int:
        return self.recipe.epochs

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that has a say in the result, but the images."""
        recipe = {name: value for name, value in self.recipe.as_dict().items() if name != "summary"}
        return {
            "model": self.model,
            "model_args": dict(self.model_args),
            "seed": self.seed,
            "recipe": recipe,
            "split": dict(self.split),
            "base": self.base.settings if self.base else None,
        }

    @cached_property
    def key(self) -> str:
        return key_of(self.phase, self.settings)

    def __str__(self) -> str:
        rate, decay = self.recipe.learning_rate, self.recipe.weight_decay
        return f"{self.method}, {self.phase}, rate {rate:g}, decay {decay:g}, seed {self.seed}"


def key_of(phase: str, settings: Mapping[str, Any]) -> str:
    """Equal for jobs whose results may take each other's place, whatever the study calls the method."""
    return hashlib.blake2b(json.dumps([phase, settings], sort_keys=True).encode(), digest_size=6).hexdigest()


def by_key(results: Iterable[Result]) -> dict[str, Result]:
    """Of results of the same job, the first."""
    found: dict[str, Result] = {}
    for result in results:
        found.setdefault(key_of(result.phase, result.settings), result)
    return found


@dataclass
class Plan:
    """The runs of a study in the order in which they are wanted, and those whose settings are not known yet, as method
    and epochs."""

    jobs: list[Job] = field(default_factory=list)
    waiting: list[tuple[str, int]] = field(default_factory=list)

    def add(self, method: str, jobs: list[Job] | None, count: int, epochs: int) -> None:
        if jobs is None:
            self.waiting += [(method, epochs)] * count
        else:
            self.jobs += jobs


def plan_jobs(study: Study, found: Found) -> Plan:
    """Every run of the study but those to upgrade from, which are the `base` of others."""
    plan = Plan()
    for method in study.methods:
        plan.add(method.name, trial_jobs(study, method, found), len(study.tuning.grid), study.parts(method, "trial")[1])
        plan.add(method.name, final_jobs(study, method, found), len(method.seeds), study.parts(method, "final")[1])
    return plan


def tell_unused(study: Study, found: Found, path: Path) -> str:
    """A line on results of settings that the study does not have, or not any more; empty if there are none."""
    jobs = plan_jobs(study, found).jobs
    used = {job.key for each in jobs for job in (each, each.base) if job is not None}
    count = sum(key not in used for key in found)
    return f"{count} results in {path} are of other settings than the study's; they stay there, unused" if count else ""


def trial_jobs(study: Study, method: Method, found: Found) -> list[Job] | None:
    """The runs that the method's settings are chosen by, in the order of the grid; `None` while the settings of the
    method that it is upgraded from are not known."""
    return _jobs(study, method, "trial", [(study.tuning.seed, *setting) for setting in study.tuning.grid], found)


def final_jobs(study: Study, method: Method, found: Found) -> list[Job] | None:
    """The runs with the best setting, one a seed; `None` while that is not known."""
    setting = best_setting(study, method, found)
    if setting is None:
        return None
    return _jobs(study, method, "final", [(seed, *setting) for seed in method.seeds], found)


def best_setting(study: Study, method: Method, found: Found) -> tuple[float, float] | None:
    """The rate and the decay with the highest accuracy on the images kept apart, the first of equals; `None` while a
    trial is missing, or if all of them diverged."""
    results = [found.get(job.key) for job in trial_jobs(study, method, found) or []]
    if not results or None in results:
        return None
    scores = [-1.0 if result is None or result.accuracy is None else result.accuracy for result in results]
    best = max(range(len(scores)), key=scores.__getitem__)
    return study.tuning.grid[best] if scores[best] >= 0 else None


def _jobs(
    study: Study, method: Method, phase: Phase, wanted: list[tuple[int, float, float]], found: Found
) -> list[Job] | None:
    before, after = study.parts(method, phase)
    source = study.method(method.upgrade_from) if before else None
    setting = best_setting(study, source, found) if source else None
    if source and setting is None:
        return None
    split = {"kept": study.kept, "seed": study.split_seed}
    jobs = []
    for seed, rate, decay in wanted:
        base = None
        if source and setting:
            recipe = study.recipe_of(source, before, *setting)
            base = Job(source.name, "base", seed, source.model, source.model_args, recipe, split)
        recipe = study.recipe_of(method, after, rate, decay)
        jobs.append(Job(method.name, phase, seed, method.model, method.model_args, recipe, split, base))
    return jobs
