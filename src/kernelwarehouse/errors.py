"""What can go wrong, by name. Every error says what was met, its value, and what would be right."""


class KernelWarehouseError(ValueError):
    """Base of all errors of this library."""


class PlanError(KernelWarehouseError):
    """A plan that cannot be made for this model, or that does not fit it."""


class ConfigError(PlanError):
    """A configuration value that makes no sense for any model."""


class ConvertError(KernelWarehouseError):
    """A model that cannot be converted."""


class CheckpointError(KernelWarehouseError):
    """A file that is missing, damaged, foreign or of another model."""


class UnknownPresetError(KernelWarehouseError):
    """A preset name that the zoo does not have."""


class DataError(KernelWarehouseError):
    """Images, labels or classes that are missing, damaged or do not fit."""


class UnreadableImageError(DataError):
    """One image that cannot be decoded; its name is in the message."""


class RecipeError(KernelWarehouseError):
    """A training recipe, or an override of one, that makes no sense."""


class TrainingError(KernelWarehouseError):
    """A run that cannot start, go on, or be kept."""


class DivergedError(TrainingError):
    """A run whose loss or weights are no longer finite."""


class ShapeError(KernelWarehouseError):
    """Tensors whose shapes or types do not fit each other or the layer."""


class StrategyError(KernelWarehouseError):
    """An evaluation strategy that does not exist, or that cannot do what is asked of it."""


class PrecisionError(KernelWarehouseError):
    """A type of numbers that torch cannot compute in on this processor."""


class MeasurementError(KernelWarehouseError):
    """A measurement that could not be taken."""


class StudyError(KernelWarehouseError):
    """A study that makes no sense, or results that are none of it."""


class MissingExtraError(KernelWarehouseError):
    """A part of the library whose optional packages are not installed; the message says how to install them."""


class Terminated(KernelWarehouseError):
    """A run that was asked to end by SIGTERM, and has written a checkpoint first."""


class KernelWarehouseWarning(UserWarning):
    """Something worth knowing that does not stop the work."""
