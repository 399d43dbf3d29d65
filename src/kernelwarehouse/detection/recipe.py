"""How to train a detector, as data: the fields that every recipe has, and those that only detectors need.

The recipes, also called schedules, lie in `recipes/*.toml`, each complete, each value explained and sourced there.
"""

from dataclasses import dataclass
from importlib.resources import files
from typing import get_args

from kernelwarehouse.detection.backbone import Norms
from kernelwarehouse.detection.detector import Sizes
from kernelwarehouse.errors import RecipeError
from kernelwarehouse.training.recipe import MOST_IMAGE_SIZE, EngineRecipe, read_recipe, recipe_names

SCHEDULES = files(__package__) / "recipes"
LEAST_SIDE = 32


@dataclass(frozen=True, kw_only=True)
class DetectionRecipe(EngineRecipe):
    """One strategy to train a detector; `recipes/1x.toml` is the one to read first."""

    decay_at: tuple[int, ...]

    short_sides: tuple[int, ...]
    evaluation_side: int
    longest_side: int
    flip: float

    frozen_stages: int
    norms: str
    width: int
    proposals: int
    sampled_boxes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("norms", get_args(Norms))
        self._check_range("flip", most=1)
        for name in ("width", "proposals", "sampled_boxes"):
            self._check_range(name, above=0)
        self._check_sides()
        if self.frozen_stages < -1:
            raise RecipeError(f"frozen_stages (={self.frozen_stages}) must be at least -1, which freezes nothing")
        if self.compile:
            raise RecipeError("compile (=True) is not for detectors, whose shapes change with every batch; use false")
        out_of_run = [epoch for epoch in self.decay_at if not 0 < epoch < self.epochs]
        if self.schedule == "step" and (out_of_run or list(self.decay_at) != sorted(set(self.decay_at))):
            raise RecipeError(
                f"decay_at (={list(self.decay_at)}) must be growing numbers of epochs within the run of {self.epochs}; "
                f"override it as well, for instance --set decay_at=[{self.epochs * 3 // 4 or ''}]"
            )

    def _check_sides(self) -> None:
        for name, sides in (("short_sides", self.short_sides), ("evaluation_side", (self.evaluation_side,))):
            if not sides or not all(LEAST_SIDE <= side <= self.longest_side for side in sides):
                raise RecipeError(
                    f"{name} (={list(sides)}) must be at least {LEAST_SIDE} and at most longest_side "
                    f"(={self.longest_side})"
                )
        self._check_range("longest_side", most=MOST_IMAGE_SIZE)

    @property
    def drops(self) -> tuple[int, ...]:
        return self.decay_at

    @property
    def training_sizes(self) -> Sizes:
        return self.short_sides, self.longest_side

    @property
    def evaluation_sizes(self) -> Sizes:
        return (self.evaluation_side,), self.longest_side

    @property
    def options(self) -> dict[str, float]:
        """torchvision's names for the numbers of proposals and boxes."""
        return {
            "rpn_pre_nms_top_n_train": 2 * self.proposals,
            "rpn_pre_nms_top_n_test": self.proposals,
            "rpn_post_nms_top_n_train": self.proposals,
            "rpn_post_nms_top_n_test": self.proposals,
            "box_batch_size_per_image": self.sampled_boxes,
        }


def schedule_names() -> list[str]:
    return recipe_names(SCHEDULES)


def load_schedule(name: str) -> DetectionRecipe:
    """A recipe by its name, or one of your own by the path of its `.toml` file."""
    return read_recipe(DetectionRecipe, name, SCHEDULES)
