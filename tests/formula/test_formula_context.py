"""The closed form under context parallelism against what one rank of it saves: every saved tensor, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from jettison.ledger.compare import compare
from jettison.parallel.context_parallel import Context, set_cores
from jettison.parallel.tp_collectives import Axis
from jettison.spec.layout import Layout
from jettison.train.build_model import Built, in_parts, shifted_within
from support.formula_cases import VOCABULARY, FormulaCase, model_of, run_of, traced_call, written

CASES = [
    FormulaCase(family="llama", attention="sdpa", precision="bf16-pure"),
    FormulaCase(family="llama", attention="eager", precision="bf16-pure"),
    FormulaCase(family="gpt2", attention="sdpa"),
    FormulaCase(family="gpt2", attention="eager", dropout=0.1),
    FormulaCase(family="qwen3", attention="sdpa", batch=1),
]


@pytest.mark.parametrize(("rank", "ranks"), [(1, 2), (0, 4)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_saved_tensors_of_a_rank_are_those_of_the_formula(case: FormulaCase, rank: int, ranks: int) -> None:
    """A kernel holds its rows of q, k and v and not the gathered keys; a core that is written out has them."""
    model, context = model_of(case), Context(Axis("nobody is asked", ranks, rank))
    set_cores(model, context)
    built = in_parts(Built(model=model, call=shifted_within), context, end=None, bf16=case.precision != "fp32")
    found = traced_call(model, built.call(torch.randint(1, VOCABULARY, (case.batch, case.sequence + 1))))
    run = replace(run_of(case), layout=Layout(cp=ranks))
    expected = written(run).on_rank(run.layout.mesh_sizes)
    assert [str(difference) for difference in compare(expected, found)] == []
    layer = [entry for entry in found if entry.layer == "layers.0"]
    whole = [e for e in layer if e.role == "attention key" and case.sequence in e.shape]
    assert bool(whole) == (case.attention == "eager")
