"""Chooses: each region's frontier, one option a region under a budget in bytes, and the plan as a document.

A name is imported when it is first asked for: a ledger needs the policies of this room, and none of its solver.
"""

from importlib import import_module
from types import MappingProxyType
from typing import Any

_HOME_OF = MappingProxyType(
    {
        name: home
        for home, names in (
            ("plan", ("LayerPlan", "Plan", "PolicyWord", "Predicted", "SolverReport")),
            ("plan", ("policy_word", "recompute_flops")),
            ("chain", ("Certificate", "Solution", "Status", "choose")),
            ("frontier", ("NONE_KEY", "FrontierPoint", "fewest_bytes_point", "pareto_frontier", "plain_point")),
            ("levels", ("Choice", "Level", "Levels", "LevelPhase", "evaluate")),
            ("moves", ("minimum_budget",)),
            ("problem", ("ProblemRegion", "RegionOption", "RootOption", "SegmentOption", "StepProblem")),
        )
        for name in names
    }
)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(_HOME_OF)}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
