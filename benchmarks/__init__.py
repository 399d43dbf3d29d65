"""Measurements of time and memory: `python -m benchmarks.speed`, `benchmarks.memory` and `benchmarks.scaling`.

`python -m benchmarks.results` prints what is committed, `python -m benchmarks.page` puts it into the documentation.
"""
