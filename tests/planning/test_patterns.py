"""Patterns over layer names."""

import pytest

import kernelwarehouse as kw
from kernelwarehouse.planning.patterns import Patterns, matches

NAMES = ["conv1", "layer1.0.conv1", "layer1.0.conv2", "layer10.0.conv1", "blocks.0.attn.qkv:value"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("conv1", ["conv1"]),
        ("layer1", ["layer1.0.conv1", "layer1.0.conv2"]),
        ("layer1.0", ["layer1.0.conv1", "layer1.0.conv2"]),
        ("layer1*", ["layer1.0.conv1", "layer1.0.conv2", "layer10.0.conv1"]),
        ("*.conv1", ["layer1.0.conv1", "layer10.0.conv1"]),
        ("layer?.0.conv[2-9]", ["layer1.0.conv2"]),
        ("*.qkv", ["blocks.0.attn.qkv:value"]),
        ("*:value", ["blocks.0.attn.qkv:value"]),
        ("*", NAMES),
    ],
)
def test_a_pattern_fits_a_name_or_what_holds_it(pattern: str, expected: list[str]) -> None:
    assert [name for name in NAMES if matches(pattern, name)] == expected
    assert Patterns([pattern], NAMES).matches == set(expected)


def test_patterns_add_up() -> None:
    assert Patterns(["conv1", "layer10"], NAMES).matches == {"conv1", "layer10.0.conv1"}
    assert Patterns([], NAMES).matches == set()


def test_case_counts() -> None:
    assert not matches("Conv1", "conv1")


def test_a_pattern_that_fits_nothing_is_an_error_with_a_hint() -> None:
    with pytest.raises(kw.PlanError, match=r"'layer1\.0\.conv3' matches no layer; near it are layer1\.0\.conv2"):
        Patterns(["conv1", "layer1.0.conv3"], NAMES)
    with pytest.raises(kw.PlanError, match="layers are named like conv1"):
        Patterns(["#####"], NAMES)
    with pytest.raises(kw.PlanError, match="'a' matches no layer"):
        Patterns(["a"], [])
