"""KernelWarehouse for PyTorch: dynamic convolution with warehouses of shared kernel cells."""

from kernelwarehouse.config import Override, WarehouseConfig
from kernelwarehouse.conversion import convert, plan_of
from kernelwarehouse.costs import explain
from kernelwarehouse.errors import (
    CheckpointError,
    ConfigError,
    ConvertError,
    KernelWarehouseError,
    KernelWarehouseWarning,
    PlanError,
    UnknownPresetError,
)
from kernelwarehouse.inference import Preparation, prepare_inference
from kernelwarehouse.planning.api import plan
from kernelwarehouse.planning.plan import Plan
from kernelwarehouse.saving.checkpoint import load, save
from kernelwarehouse.saving.published import load_published
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
