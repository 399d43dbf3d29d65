"""The results of a study: a row for each method, and what its settings were chosen by."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.table import Table

from kernelwarehouse._terminal import printed
from kernelwarehouse.errors import StudyError
from kernelwarehouse.study.jobs import Found, best_setting, final_jobs, trial_jobs
from kernelwarehouse.study.results import Result
from kernelwarehouse.study.spec import Method, Study
from kernelwarehouse.study.statistics import Estimate, estimate


@dataclass(frozen=True)
class Row:
    """A method. `tested` are the test accuracies by seed, in per cent; `difference` is to the baseline, over the seeds
    that both have. `trials` are the accuracies on the images kept apart, in per cent, in the order of the grid: `None`
    for one that diverged, no entry for one that was not run."""

    method: Method
    setting: tuple[float, float] | None
    parameters: int | None
    minutes: float | None
    tested: dict[int, float]
    diverged: int
    accuracy: Estimate | None
    difference: Estimate | None
    paper_difference: float | None
    trials: dict[tuple[float, float], float | None]

    @property
    def seeds(self) -> str:
        wanted = len(self.method.seeds)
        count = f"{len(self.tested)}" if len(self.tested) == wanted else f"{len(self.tested)} of {wanted}"
        return f"{count}, {self.diverged} diverged" if self.diverged else count


def make_rows(study: Study, found: Found) -> list[Row]:
    """In the study's order, also for methods of which nothing was run yet."""
    finals = {method.name: _final_results(study, method, found) for method in study.methods}
    baseline = study.method(study.baseline)
    rows = []
    for method in study.methods:
        results, minutes = finals[method.name], _minutes(study, method, found)
        tested, reference = _tested(results), _tested(finals[baseline.name])
        pairs = [] if method is baseline else [tested[seed] - reference[seed] for seed in tested if seed in reference]
        papers = None if method is baseline else (method.paper, baseline.paper)
        rows.append(
            Row(
                method=method,
                setting=best_setting(study, method, found),
                parameters=results[0].parameters if results else None,
                minutes=fmean(minutes) if minutes else None,
                tested=tested,
                diverged=sum(result.diverged for result in results),
                accuracy=estimate(list(tested.values())),
                difference=estimate(pairs),
                paper_difference=papers[0] - papers[1] if papers and papers[0] and papers[1] else None,
                trials=_trials(study, method, found),
            )
        )
    return rows


def _final_results(study: Study, method: Method, found: Found) -> list[Result]:
    jobs = final_jobs(study, method, found) or []
    return [found[job.key] for job in jobs if job.key in found]


def _minutes(study: Study, method: Method, found: Found) -> list[float]:
    """Of whole runs, with what came before an upgrade."""
    jobs = [job for job in final_jobs(study, method, found) or [] if job.key in found]
    parts = [[each.key for each in (job.base, job) if each is not None] for job in jobs]
    return [sum(found[key].seconds for key in keys) / 60 for keys in parts if all(key in found for key in keys)]


def _tested(results: Sequence[Result]) -> dict[int, float]:
    return {result.seed: 100 * result.test_accuracy for result in results if result.test_accuracy is not None}


def _trials(study: Study, method: Method, found: Found) -> dict[tuple[float, float], float | None]:
    jobs = trial_jobs(study, method, found) or []
    results = {setting: found.get(job.key) for setting, job in zip(study.tuning.grid, jobs, strict=False)}
    return {
        setting: None if result.accuracy is None else 100 * result.accuracy
        for setting, result in results.items()
        if result is not None
    }


Cells = list[list[str]]


def result_cells(study: Study, rows: Sequence[Row]) -> Cells:
    """The heading, and a line for each method; what was not run is empty."""
    heading = ["method", "params", "rate", "decay", "min", "seeds", "test (%)"]
    cells = [[*heading, f"to {study.baseline}", "paper", "paper's"]]
    for row in rows:
        if not row.method.seeds:  # only tried
            continue
        rate, decay = row.setting or (None, None)
        cells.append(
            [
                row.method.name,
                "" if row.parameters is None else f"{row.parameters:,}",
                _number(rate, "g"),
                _number(decay, "g"),
                _number(row.minutes, ".1f"),
                row.seeds if row.tested or row.diverged else "",
                _with_spread(row.accuracy, ".2f", row.accuracy.deviation if row.accuracy else None),
                _with_spread(row.difference, "+.2f", row.difference.interval if row.difference else None),
                _number(row.method.paper, ".2f"),
                _number(row.paper_difference, "+.2f"),
            ]
        )
    return cells


def trial_cells(study: Study, rows: Sequence[Row]) -> Cells:
    """Accuracy on the images kept apart by rate and decay; the best of a method is marked."""
    cells = [["method", *(f"{rate:g} / {decay:g}" for rate, decay in study.tuning.grid)]]
    for row in rows:
        line = [row.method.name]
        for setting in study.tuning.grid:
            value = row.trials.get(setting)
            text = ("diverged" if setting in row.trials else "") if value is None else f"{value:.2f}"
            line.append(f"**{text}**" if setting == row.setting else text)
        cells.append(line)
    return cells


def legend(study: Study, rows: Sequence[Row]) -> str:
    text = (
        f"{_epochs(study.epochs)}. Test: accuracy on the test images after the last epoch, mean ± standard deviation "
        f"over the seeds. To {study.baseline}: mean of the differences between runs of the same seed ± half of its 95% "
        "interval (Student's t). Min: minutes of a run's training steps, on one core. Empty: not run yet."
    )
    if any(row.method.paper is not None for row in rows):
        text += f" Paper, and its difference to {study.baseline}: {study.paper_note or 'as printed there'}."
    return text


def trial_legend(study: Study, rows: Sequence[Row]) -> str:
    text = (
        f"Accuracy (%) on the {study.kept:,} training images kept apart, by learning rate / weight decay, after "
        f"{_epochs(study.length('trial'))} with seed {study.tuning.seed}; the best of a method is marked."
    )
    rates = study.tuning.learning_rates
    edge = [row.method.name for row in rows if row.setting and row.setting[0] in (rates[0], rates[-1])]
    if edge and len(rates) > 1:
        text += f" Best at the first or last rate, so that a better one may lie outside: {'; '.join(edge)}."
    return text


def as_text(study: Study, rows: Sequence[Row]) -> str:
    parts = [_rich(result_cells(study, rows)), legend(study, rows), ""] if study.tests else []
    return "\n".join([study.title, *parts, _rich(trial_cells(study, rows)), trial_legend(study, rows), ""])


def as_markdown(study: Study, rows: Sequence[Row]) -> str:
    parts = [_markdown(result_cells(study, rows)), legend(study, rows)] if study.tests else []
    return "\n\n".join([*parts, _markdown(trial_cells(study, rows)), trial_legend(study, rows)]) + "\n"


def placed(page: str | None, table: str, name: str) -> str:
    """The table between the marks of a page, the rest of which stays: the marks of this study, as a page may have
    several, or those without a name. Alone where there is no page, or one without any marks."""
    if page is None or "<!-- study" not in page:
        return table
    for label in (f"study: {name}", "study"):
        begin, end = f"<!-- {label} -->\n", f"<!-- /{label} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if found and closed:
            return f"{before}{begin}{table}{end}{after}"
    raise StudyError(
        f"the page has marks of studies and no place for the table of {name!r}; write <!-- study: {name} --> on a line "
        f"of its own and <!-- /study: {name} --> below it where that is to be"
    )


def _epochs(count: int) -> str:
    return f"{count} epoch{'s' * (count != 1)}"


def as_csv(rows: Sequence[Row]) -> str:
    """Every figure, unrounded: a line for each method, then one for each trial, in the same columns."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heading = ["method", "model", "parameters", "learning_rate", "weight_decay", "minutes", "seeds", "diverged"]
    heading += ["test_accuracy_mean", "test_accuracy_deviation", "difference_mean", "difference_interval", "pairs"]
    writer.writerow([*heading, "paper", "paper_difference", "trial_accuracy"])
    for row in rows:
        rate, decay = row.setting or (None, None)
        mean, difference = row.accuracy, row.difference
        values = [row.method.name, row.method.model, row.parameters, rate, decay, row.minutes]
        values += [len(row.tested), row.diverged]
        values += [mean.mean, mean.deviation] if mean else [None, None]
        values += [difference.mean, difference.interval, difference.count] if difference else [None, None, 0]
        values += [row.method.paper, row.paper_difference, None]
        writer.writerow(["" if value is None else value for value in values])
    for row in rows:
        for (rate, decay), accuracy in row.trials.items():
            values = [row.method.name, row.method.model, None, rate, decay, None, 0, int(accuracy is None)]
            values += [None] * (len(heading) - len(values) + 2) + [accuracy]
            writer.writerow(["" if value is None else value for value in values])
    return text.getvalue()


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _with_spread(value: Estimate | None, form: str, spread: float | None) -> str:
    if value is None:
        return ""
    return f"{value.mean:{form}}" + ("" if spread is None else f" ± {spread:.2f}")


def _rich(cells: Cells) -> str:
    table = Table()
    for heading in cells[0]:
        named = heading == "method"
        table.add_column(heading, justify="left" if named else "right", no_wrap=named)
    for line in cells[1:]:
        table.add_row(*(f"{cell.strip('*')} *" if cell.startswith("**") else cell for cell in line))
    return printed(table)


def _markdown(cells: Cells) -> str:
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(cells[0]) - 1), *lines[1:]])
