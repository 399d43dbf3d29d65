"""KernelWarehouse for PyTorch: dynamic convolution with warehouses of shared kernel cells."""

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
from kernelwarehouse.plan import Plan
from kernelwarehouse.planning import plan
from kernelwarehouse.temperature import TemperatureSchedule, get_temperature, set_temperature

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConvertError",
    "KernelWarehouseError",
    "KernelWarehouseWarning",
    "Override",
    "Plan",
    "PlanError",
    "TemperatureSchedule",
    "UnknownPresetError",
    "WarehouseConfig",
    "convert",
    "get_temperature",
    "plan",
    "plan_of",
    "set_temperature",
]
