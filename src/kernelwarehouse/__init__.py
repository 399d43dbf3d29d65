"""KernelWarehouse for PyTorch: dynamic convolution with warehouses of shared kernel cells."""

from kernelwarehouse._version import __version__
from kernelwarehouse.assemble import force
from kernelwarehouse.config import Override, WarehouseConfig
from kernelwarehouse.conversion import convert, plan_of
from kernelwarehouse.costs import explain
from kernelwarehouse.errors import (
    CheckpointError,
    ConfigError,
    ConvertError,
    DataError,
    DivergedError,
    KernelWarehouseError,
    KernelWarehouseWarning,
    MeasurementError,
    MissingExtraError,
    PlanError,
    PrecisionError,
    RecipeError,
    ShapeError,
    StrategyError,
    StudyError,
    Terminated,
    TrainingError,
    UnknownPresetError,
    UnreadableImageError,
)
from kernelwarehouse.inference import Preparation, prepare_inference
from kernelwarehouse.planning.api import plan
from kernelwarehouse.planning.plan import Plan
from kernelwarehouse.saving.checkpoint import load, save
from kernelwarehouse.saving.published import load_published
from kernelwarehouse.step_sizes import parameter_groups
from kernelwarehouse.temperature import TemperatureSchedule, get_temperature, set_temperature
from kernelwarehouse.zoo import create_model

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConvertError",
    "DataError",
    "DivergedError",
    "KernelWarehouseError",
    "KernelWarehouseWarning",
    "MeasurementError",
    "MissingExtraError",
    "Override",
    "Plan",
    "PlanError",
    "PrecisionError",
    "Preparation",
    "RecipeError",
    "ShapeError",
    "StrategyError",
    "StudyError",
    "TemperatureSchedule",
    "Terminated",
    "TrainingError",
    "UnknownPresetError",
    "UnreadableImageError",
    "WarehouseConfig",
    "__version__",
    "convert",
    "create_model",
    "explain",
    "force",
    "get_temperature",
    "load",
    "load_published",
    "parameter_groups",
    "plan",
    "plan_of",
    "prepare_inference",
    "save",
    "set_temperature",
]
