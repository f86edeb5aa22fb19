"""One request from options to files: `DiffusionTask`, `Generator`, `Stages`, `Shape`, and the output folder."""

from .call import CallPlan, plan_call
from .errors import LoadError, OutputError, RequestError
from .generator import Generator, Item, Result
from .metrics import Metrics, Stopwatch
from .output import new_folder, write_result
from .progress import Progress
from .shape import Shape, shape_of
from .stages import Stages
from .task import DiffusionTask

__all__ = [
    "CallPlan",
    "DiffusionTask",
    "Generator",
    "Item",
    "LoadError",
    "Metrics",
    "OutputError",
    "Progress",
    "RequestError",
    "Result",
    "Shape",
    "Stages",
    "Stopwatch",
    "new_folder",
    "plan_call",
    "shape_of",
    "write_result",
]
