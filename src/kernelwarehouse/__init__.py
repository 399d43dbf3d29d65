"""KernelWarehouse for PyTorch: dynamic convolution with warehouses of shared kernel cells."""

import kernelwarehouse.training.small_networks  # noqa: F401  registers its networks with timm, where load looks
from kernelwarehouse.checkpoint import load, save
from kernelwarehouse.config import Override, WarehouseConfig
from kernelwarehouse.convert import convert, plan_of
from kernelwarehouse.errors import (
    CheckpointError,
    ConfigError,
    ConvertError,
    KernelWarehouseError,
    KernelWarehouseWarning,
    PlanError,
    UnknownPresetError,
)
from kernelwarehouse.explain import explain
from kernelwarehouse.inference import Preparation, prepare_inference
from kernelwarehouse.plan import Plan
from kernelwarehouse.planning import plan
from kernelwarehouse.published import load_published
from kernelwarehouse.temperature import TemperatureSchedule, get_temperature, set_temperature
from kernelwarehouse.zoo import create_model

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConvertError",
    "KernelWarehouseError",
    "KernelWarehouseWarning",
    "Override",
    "Plan",
    "PlanError",
    "Preparation",
    "TemperatureSchedule",
    "UnknownPresetError",
    "WarehouseConfig",
    "convert",
    "create_model",
    "explain",
    "get_temperature",
    "load",
    "load_published",
    "plan",
    "plan_of",
    "prepare_inference",
    "save",
    "set_temperature",
]
