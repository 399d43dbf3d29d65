import dataclasses
import json
import math
from fractions import Fraction

import numpy as np
import pytest

import kernelwarehouse as kw

FULL = kw.WarehouseConfig(
    budget="1/2",
    in_ratio=0.5,
    out_ratio=Fraction(1, 4),
    spatial_partition=False,
    start="one_to_many",
    reduction=1 / 32,
    norm="layer",
    attention="relu",
    low_rank=1 / 16,
    groups={"a": ["layer1.*", "layer2.0.conv1"], "b": ["layer3"]},
    exclude=["conv1"],
    static_stem=False,
    static_classifier=False,
    max_layers=None,
    overrides=(kw.Override("b", budget=2), {"pattern": "layer1.*", "reduction": "1/8"}),
)


BOTH_BEGINS = kw.WarehouseConfig(begin="logits", overrides=[kw.Override("layer1", begin="temperature")])


@pytest.mark.parametrize("config", [kw.WarehouseConfig(), kw.WarehouseConfig(sharing="same_shape"), FULL, BOTH_BEGINS])
def test_round_trip_through_json(config: kw.WarehouseConfig) -> None:
    text = json.dumps(config.to_dict())
    again = kw.WarehouseConfig.from_dict(json.loads(text))
    assert again == config
    assert hash(again) == hash(config)


def test_texts_and_fractions_become_numbers() -> None:
    assert FULL.budget == 0.5
    assert FULL.out_ratio == 0.25
    assert FULL.overrides[1].reduction == 0.125


def test_numbers_of_numpy_are_numbers() -> None:
    assert kw.WarehouseConfig(budget=np.float32(0.5)).budget == 0.5


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        kw.WarehouseConfig().budget = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget", math.nan),
        ("budget", math.inf),
        ("budget", 0),
        ("budget", -1),
        ("budget", "half"),
        ("budget", "1/0"),
        ("budget", "1e400"),
        ("budget", 10**400),
        ("budget", 1e12),
        ("spatial_partition", "no"),
        ("max_layers", True),
        ("overrides", None),
        ("overrides", [{"pattern": "layer1"}]),
        ("budget", True),
        ("budget", None),
        ("in_ratio", 1.5),
        ("out_ratio", 0),
        ("reduction", None),
        ("reduction", -0.5),
        ("low_rank", 2),
        ("norm", "group"),
        ("attention", "hard"),
        ("start", "two_to_two"),
        ("start", None),
        ("sharing", "network"),
        ("max_layers", 0),
        ("exclude", "conv1"),
        ("exclude", [""]),
        ("groups", ["layer1"]),
        ("groups", {"a": "layer1"}),
        ("overrides", ["layer1"]),
        ("overrides", [{"pattern": "layer1", "budgets": 1}]),
        ("overrides", [{"pattern": ""}]),
        ("overrides", [{"pattern": "layer1", "spatial_partition": "no"}]),
        ("overrides", {"layer1": 2}),
        ("spatial_partition", None),
        ("spatial_partition", 1),
        ("static_stem", "no"),
        ("static_stem", None),
        ("static_classifier", 1),
        ("static_classifier", "False"),
        ("exclude", {"conv1": True}),
        ("exclude", b"conv1"),
        ("exclude", None),
        ("groups", {"a": []}),
        ("groups", {"": ["layer1"]}),
        ("groups", {1: ["layer1"]}),
        ("groups", None),
        ("sharing", True),
        ("sharing", ["stage"]),
        ("max_layers", 2.0),
        ("max_layers", "8"),
        ("norm", None),
        ("attention", 3),
        ("begin", None),
        ("begin", "zero"),
    ],
)
def test_nonsense_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(kw.ConfigError) as error:
        kw.WarehouseConfig(**{field: value})
    assert field.rstrip("s") in str(error.value)


def test_override_names_its_pattern_in_errors() -> None:
    with pytest.raises(kw.ConfigError, match=r"layer1.*budget is nan"):
        kw.Override("layer1", budget=math.nan)


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(kw.ConfigError, match="bugdet"):
        kw.WarehouseConfig.from_dict({"bugdet": 1})


@pytest.mark.parametrize("sharing", ["none", "layer", "same_shape"])
def test_groups_and_sharing_say_the_same_thing_twice(sharing: str) -> None:
    with pytest.raises(kw.ConfigError, match=f"sharing is '{sharing}', and groups"):
        kw.WarehouseConfig(sharing=sharing, groups={"a": ["layer1"]})
    assert kw.WarehouseConfig(sharing="stage", groups={"a": ["layer1"]}).groups == {"a": ("layer1",)}


@pytest.mark.parametrize("data", [None, 3, "budget", ["budget"]])
def test_settings_come_as_a_mapping(data: object) -> None:
    with pytest.raises(kw.ConfigError, match="mapping"):
        kw.WarehouseConfig.from_dict(data)  # type: ignore[arg-type]
