"""Why a layer stays static: what cannot be converted, and what is left alone by choice."""

from collections.abc import Callable

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import kernelwarehouse as kw
from kernelwarehouse.conversion import converted_layers


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


def reasons(model: nn.Module, **settings: object) -> dict[str, str]:
    return {layer.name: layer.reason for layer in kw.plan(model, kw.WarehouseConfig(**settings)).static}


def test_static_layers_say_why() -> None:
    assert "tied" in reasons(Tied())["head"]
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), nn.Conv2d(4, 4, 3))
    assert "computed" in reasons(normed)["0"]
    transposed = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3))
    assert "can be converted" in reasons(transposed)["1"]
    encoder = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 8))
    assert "directly" in reasons(encoder)["1.linear1"]
    assert "directly" in reasons(encoder)["1.self_attn.out_proj"]
    assert "classifier" in reasons(encoder)["2"]

    class Own(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).abs()

    assert "Own" in reasons(nn.Sequential(Own(4, 4, 3), nn.Conv2d(4, 4, 3)))["0"]


def test_layers_on_pooled_features_stay_static() -> None:
    with torch.device("meta"):
        assert "pooled" in reasons(timm.create_model("efficientnet_b0"))["blocks.0.0.se.conv_reduce"]
        assert "pooled" in reasons(timm.create_model("resnetv2_50"))["head.fc"]


class Scaled(nn.Conv2d):
    """A subclass with torch's forward and a parameter, a buffer or a module that a hook or another layer uses."""

    def __init__(self, extra: str) -> None:
        super().__init__(4, 4, 3, padding=1)
        if extra == "parameter":
            self.scale = nn.Parameter(torch.ones(4))
        elif extra == "buffer":
            self.register_buffer("scale", torch.ones(4))
        else:
            self.scale = nn.Identity()


@pytest.mark.parametrize("extra", ["parameter", "buffer", "module"])
def test_layers_that_hold_more_stay_static(extra: str) -> None:
    model = nn.Sequential(Scaled(extra), nn.Conv2d(4, 4, 3))
    assert reasons(model) == {"0": "it holds more than a weight and a bias: scale"}
    assert isinstance(kw.convert(model, kw.plan(model))[0], Scaled)


def test_parameters_hung_on_a_plain_layer_keep_it_static() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[0].register_buffer("mask", torch.ones(4))
    assert "mask" in reasons(model)["0"]


@pytest.mark.parametrize("method", ["forward", "_conv_forward"])
def test_a_forward_set_on_the_instance_stays(method: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    setattr(model[0], method, lambda x, *rest: torch.zeros(2, 4, 4, 4))
    assert reasons(model)["0"] == "a forward of its own was set on it"
    converted = kw.convert(model, kw.plan(model))
    torch.testing.assert_close(converted(torch.randn(2, 4, 6, 6)), model(torch.randn(2, 4, 6, 6)))


def test_a_call_of_its_own_stays() -> None:
    class Loud(nn.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x).abs()

    assert "Loud" in reasons(nn.Sequential(Loud(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))["0"]


def test_hooks_on_the_state_dict_stay() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[0].register_state_dict_post_hook(lambda module, state, prefix, metadata: None)
    assert "state dict" in reasons(model)["0"]


def test_a_weight_tied_to_a_bare_parameter_stays() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
            self.prototypes = self.head.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x)) + self.prototypes.sum()

    model = Bare()
    assert reasons(model, static_classifier=False) == {"head": "its weight is tied to 'prototypes'"}
    converted = kw.convert(model, kw.plan(model))
    assert converted.head.weight is converted.prototypes


def test_weights_tied_through_lists_stay() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 1), nn.Linear(4, 4), nn.Linear(4, 4)
            self.kept = nn.ParameterList([self.b.weight])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(x)) * self.a(x)

    assert reasons(Listed(), static_classifier=False) == {"b": "its weight is tied to 'kept.0'"}


def test_tied_biases_stay_tied() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[1].bias = model[0].bias
    converted = kw.convert(model, kw.plan(model))
    assert len(converted_layers(converted)) == 2
    assert converted[1].bias is converted[0].bias


class Projection(nn.Module):
    """A fused query-key-value layer; `use` is done with its bias."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.qkv, self.proj, self.last = nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 4)
        self.use = use
        if use == "tied":
            self.proj.bias = self.qkv.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.last(self.proj(self.qkv(x)))
        return out + self.qkv.bias.sum() if self.use == "read" else out


def test_a_bias_that_would_be_split_is_not() -> None:
    assert reasons(Projection("none"))["qkv:query_key"]
    assert reasons(Projection("tied"))["qkv"] == "its bias is tied to that of 'proj'"
    assert "read" in reasons(Projection("read"))["qkv"]


class Reads(nn.Module):
    """A penalty on the weight of a layer that is called too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.read = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.body(x)) + self.read.weight.square().mean()


class ReadsByChance(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.mean()) < 1e9 else x


@pytest.mark.parametrize("make", [Reads, ReadsByChance])
def test_a_layer_both_called_and_read_stays(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(2, 4, 8, 8)
    plan = kw.plan(model, example=x)
    assert [(layer.name, layer.reason) for layer in plan.static] == [
        ("read", "its weight is read by the model beside its own call")
    ]
    torch.testing.assert_close(kw.convert(model, plan)(x), model(x))


def test_a_layer_that_is_only_read_stays() -> None:
    class OnlyReads(Reads):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.conv2d(self.body(x), self.read.weight)

    assert "never called" in reasons(OnlyReads())["read"]


def test_unusual_weights_stay() -> None:
    class Special(nn.Parameter):
        pass

    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[0].weight = Special(model[0].weight.detach())
    assert "Special" in reasons(model)["0"]
    halves = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 4), nn.Linear(4, 4))
    assert "complex64" in reasons(halves)["0"]
    summed = nn.Sequential(nn.Conv2d(12, 4, 3), nn.Conv2d(4, 4, 3))
    summed[0].weight = nn.Parameter(summed[0].weight.detach().sum(1, keepdim=True))
    assert "(4, 1, 3, 3)" in reasons(summed)["0"]


def test_paddings_that_torch_does_not_follow_stay() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.Conv2d(4, 4, 3))
    assert "0" not in reasons(model)
    model[0].padding = (2, 2)
    assert "does not follow" in reasons(model)["0"]


def test_lazy_layers_are_plain_once_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyConv2d(4, 3))
    model(torch.randn(2, 4, 8, 8))
    assert reasons(model) == {}


def test_stem_and_classifier_are_left_alone_by_choice() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    assert set(reasons(model)) == {"0", "3"}
    assert set(reasons(model, static_stem=False)) == {"3"}
    assert set(reasons(model, static_classifier=False)) == {"0"}
    assert reasons(model, exclude=["1"], static_stem=False) == {
        "1": "excluded",
        "3": "the classifier (static_classifier)",
    }
