"""Chooses: each region's frontier, one option a region under a budget in bytes, and the plan as an artefact."""

from jettison.plan.artefact import LayerPlan, Plan, PolicyWord, Predicted, SolverReport, policy_word, recompute_flops
from jettison.plan.chain import Certificate, Solution, Status, choose
from jettison.plan.frontier import NONE_KEY, FrontierPoint, fewest_bytes_point, pareto_frontier, plain_point
from jettison.plan.levels import Choice, Level, Levels, Phase, evaluate
from jettison.plan.moves import minimum_budget
from jettison.plan.problem import Region, RegionOption, RootOption, SegmentOption, StepProblem

__all__ = [
    "NONE_KEY",
    "Certificate",
    "Choice",
    "FrontierPoint",
    "LayerPlan",
    "Level",
    "Levels",
    "Phase",
    "Plan",
    "PolicyWord",
    "Predicted",
    "Region",
    "RegionOption",
    "RootOption",
    "SegmentOption",
    "Solution",
    "SolverReport",
    "Status",
    "StepProblem",
    "choose",
    "evaluate",
    "fewest_bytes_point",
    "minimum_budget",
    "pareto_frontier",
    "plain_point",
    "policy_word",
    "recompute_flops",
]
