"""Offline LLM inference over a dataset: plan, run, resume, publish. Importing this imports no torch."""

import sys
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchrun.api import choose as choose
    from batchrun.api import embed as embed
    from batchrun.api import generate as generate
    from batchrun.api import plan as plan
    from batchrun.api import score as score
    from batchrun.api import submit as submit
    from batchrun.engine.request import SamplingParams as SamplingParams
    from batchrun.errors import BatchrunError as BatchrunError
    from batchrun.job import Job as Job

_HOMES = {
    "BatchrunError": "batchrun.errors",
    "Job": "batchrun.job",
    "SamplingParams": "batchrun.engine.request",
    "choose": "batchrun.api",
    "embed": "batchrun.api",
    "generate": "batchrun.api",
    "score": "batchrun.api",
    "submit": "batchrun.api",
}
__all__ = [
    "BatchrunError",
    "Job",
    "SamplingParams",
    "__version__",
    "choose",
    "embed",
    "generate",
    "plan",
    "score",
    "submit",
]


class _Package(ModuleType):
    """Keeps `batchrun.plan` the function.

    Importing the subpackage of the same name would put the module there; `from batchrun.plan import …` still works.
    """

    @property
    def plan(self) -> Any:
        return import_module("batchrun.api").plan

    @plan.setter
    def plan(self, module: ModuleType) -> None:
        """The function stays."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("batchrun")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'batchrun' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


sys.modules[__name__].__class__ = _Package
