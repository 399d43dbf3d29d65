"""Measurements of time and memory: `python -m benchmarks.speed`, `benchmarks.memory` and `benchmarks.scaling`."""
