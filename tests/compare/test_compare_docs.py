"""The table in the documentation is what the command wrote, of networks that still count the same."""

import json
from pathlib import Path

from kernelwarehouse.compare.measure import Setting
from kernelwarehouse.compare.table import Row, as_markdown
from kernelwarehouse.zoo import EVERY_PRESET

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_shows_the_measurements_beside_it():
    content = json.loads((DOCS / "comparison.json").read_text(encoding="utf-8"))
    rows = [Row(**network) for network in content["networks"]]
    assert as_markdown(rows, Setting(**content["setting"])) in (DOCS / "comparison.md").read_text(encoding="utf-8")
    assert all(row.parameters == EVERY_PRESET[row.name].parameters for row in rows if row.name in EVERY_PRESET)
