"""The page: what is shown, as plain data, and its rendering by the template in `assets/`."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kernelwarehouse._extras import require
from kernelwarehouse._files import write_file


@dataclass(frozen=True)
class Series:
    name: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Curves over one common axis; `percent` shows shares as percentages."""

    title: str
    x_label: str
    series: list[Series]
    percent: bool = False


@dataclass(frozen=True)
class Table:
    """The first cell of each row is its heading."""

    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Prediction:
    picture: str
    truth: str
    guesses: list[tuple[str, float]]

    @property
    def right(self) -> bool:
        return self.guesses[0][0] == self.truth


@dataclass(frozen=True)
class HeatMap:
    title: str
    note: str
    picture: str


@dataclass(frozen=True)
class Drawing:
    """A picture that something was drawn on."""

    caption: str
    picture: str


@dataclass(frozen=True)
class Section:
    """Predictions, drawings or heat maps of one run, under a heading."""

    title: str
    explanation: str
    predictions: list[Prediction] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    heat_maps: list[HeatMap] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    title: str
    summary: str
    result: Table
    charts: list[Chart]
    sections: list[Section]
    settings: Table


def render(page: Page) -> str:
    """The page as HTML, whole in one file."""
    require("train", "a report page")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("kernelwarehouse.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = [asdict(chart) for chart in page.charts if any(series.points for series in chart.series)]
    # "</" would end the script element that holds the data.
    data = json.dumps(charts, allow_nan=False).replace("</", "<\\/")
    return environment.get_template("page.html").render(page=page, chart_data=data)


def write_page(page: Page, path: Path) -> Path:
    # Names that are no text, as files on disk can have, are shown escaped.
    write_file(path, render(page).encode(errors="backslashreplace"))
    return path
