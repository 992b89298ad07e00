"""Lightning: a file with ``mark(model)`` and ``strategy()``, whose wrap policy can distinguish layers."""

from __future__ import annotations

from functools import partial

from jettison.frameworks.export import TargetOutput, filled, header, moves_table, names, pieces, strategy_notes
from jettison.frameworks.layer_policies import LayerAction, as_the_plan_moves
from jettison.frameworks.nearest_policy import Nearest
from jettison.frameworks.torch.write import priced_code

USE = """    model = mark(model)                    # before the Trainer sets the model up
    Trainer(strategy=strategy(), ...)      # strategy(**more) hands more on to FSDPStrategy"""


def write(nearest: Nearest) -> TargetOutput:
    """Write the file. Its wrapper restores random generator states by default."""
    subject = nearest.subject
    nearest.refuse_described()
    nearest = nearest.saying("only which layers are checkpoints", partial(priced_code, subject, states=True))
    if subject.moves:
        nearest = nearest.saying("which layers are checkpoints, and which tensors of other layers are offloaded")
        policies, cost = nearest.with_moves(as_the_plan_moves, as_the_plan_moves)
    else:
        policies, cost = nearest.checkpoints()
    table, host = moves_table({policy.layer: policy for policy in policies}), pieces("offload.py.txt")
    text = header(subject, "Lightning's FSDPStrategy", USE) + (host["imports"] if table else "")
    text += filled(
        pieces("lightning/strategy.py.txt")["strategy"],
        chosen=names(policy.layer for policy in policies if policy.action is LayerAction.CHECKPOINT),
        moves=f"\n{table}" if table else "",
        wrap=host["wrap"] if table else "",
    )
    text += host["code"] if table else ""
    files, notes = {"strategy.py": text}, strategy_notes(subject, policies)
    return TargetOutput(files=files, policies=policies, cost=cost, notes=notes)
