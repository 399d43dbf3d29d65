"""The page in a real browser: it draws what it is given, without script errors, and needs nothing else."""

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from browser import open_page
from PIL import Image

from kernelwarehouse.report.page import Chart, HeatMap, Page, Prediction, Section, Series, Table, render, write_page
from kernelwarehouse.report.pictures import data_uri, signed_heat_map

HOSTILE = "</script><script>throw new Error('escaped')</script>"


def example() -> Page:
    picture = data_uri(Image.new("RGB", (4, 4)))
    charts = [
        Chart(
            "Accuracy", "epoch", [Series("static", [(1, 0.5), (2, 0.75)]), Series("twin", [(1, 0.25), (2, 0.5)])], True
        ),
        Chart("One point", "epoch", [Series("alone", [(1.0, 3.0)])]),
        Chart("Flat at zero", "epoch", [Series("tau", [(1, 0.0), (2, 0.0)])]),
        Chart("Nothing", "epoch", [Series("empty", [])]),
        Chart(HOSTILE, HOSTILE, [Series(HOSTILE, [(0, 1), (1, 2)])]),
    ]
    sections = [
        Section("Predictions", "Some.", predictions=[Prediction(picture, "cat", [("dog", 0.75), ("cat", 0.25)])]),
        Section("Maps", "Some.", heat_maps=[HeatMap("layer1", "3 x 4", picture)]),
    ]
    result = Table(["", "static"], [["parameters", "1,000"], [HOSTILE, HOSTILE]])
    return Page(f"Report {HOSTILE}", "A summary", result, charts, sections, Table(["", "a"], [["seed", "0"]]))


def test_page_renders_in_a_browser(tmp_path: Path) -> None:
    opened = open_page(write_page(example(), tmp_path / "report.html"), tmp_path / "profile")
    assert opened.console == []
    assert opened.document.count('<div class="chart">') == 4
    assert opened.document.count("<polyline") == 4
    assert opened.document.count("<circle") == 1
    # The legends show where curves end, so the data went all the way through the scripts.
    for text in ("static 75.0%", "twin 50.0%", "alone 3", "tau 0"):
        assert f"<span>{text}</span>" in opened.document
    assert "NaN" not in opened.document


def test_browser_would_tell_of_script_errors(tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text(render(example()).replace('id="chart-data"', 'id="lost"'))
    opened = open_page(page, tmp_path / "profile")
    assert any("Uncaught TypeError" in line for line in opened.console)
    assert "<polyline" not in opened.document


def test_page_needs_no_other_file() -> None:
    text = render(example())
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert sources
    assert all(source.startswith("data:") for source in sources)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", text)


def test_numbers_that_are_none_are_refused() -> None:
    page = Page("t", "s", Table([], []), [Chart("c", "x", [Series("s", [(0, float("nan"))])])], [], Table([], []))
    with pytest.raises(ValueError, match="not JSON compliant"):
        render(page)


def test_heat_map_colours_show_sign_and_size() -> None:
    picture = signed_heat_map(np.array([[-1.0, 0.0, 1.0], [-5.0, 0.5, 5.0]]), limit=1.0)
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(data_uri(picture).partition(",")[2]))))
    blue, white, red = shown[0]
    assert white.tolist() == [255, 255, 255]
    assert blue[2] > blue[0]
    assert red[0] > red[2]
    assert shown[1, 0].tolist() == blue.tolist()
    assert shown[1, 2].tolist() == red.tolist()
    assert 255 > shown[1, 1, 1] > red[1]
