"""Layers that predict further tokens: their parameters, what they keep, where they are, and Megatron's own tests."""

from __future__ import annotations

import pytest
from benchmarks import megatron_golden

from jettison.core.errors import UsageError
from jettison.cost.flops import forward_flops, model_flops
from jettison.families.config import parse_config
from jettison.families.presets import preset
from jettison.formula.region import parameter_count
from jettison.predict.forecast import Forecast, forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.search.search import SearchRequest
from jettison.search.space import setup_run
from jettison.spec.hardware import hardware

H, F, HEADS, V, S, B = 512, 1024, 8, 4096, 256, 2
ROWS = S * B
LLAMA = parse_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": H,
        "intermediate_size": F,
        "num_attention_heads": HEADS,
        "vocab_size": V,
        "max_position_embeddings": S,
        "num_nextn_predict_layers": 1,
    },
    name="dense",
)
LAYER = 4 * H * H + 3 * H * F + 2 * H
"""Parameters."""
ADDED = LAYER + 2 * H * H + 3 * H
"""The layer, eh_proj, enorm, hnorm and the norm at its end."""


def asked(**given: object) -> Forecast:
    fields = {"kernels": "megatron", "seq": S, "micro_batch": B} | given
    return forecast(resolve(LLAMA, RunRequest(**fields)).run)


def saved(found: Forecast) -> dict[str, int]:
    return dict(found.layer_bytes())


def test_parameters() -> None:
    model = asked(mtp_num_layers=1).run.model
    assert parameter_count(model) - parameter_count(LLAMA) == ADDED
    assert parameter_count(asked(mtp_num_layers=3).run.model) - parameter_count(LLAMA) == 3 * ADDED
    run = resolve(preset("deepseek-v3"), RunRequest(kernels="megatron", mtp_num_layers=1)).run
    unique = parameter_count(run.model) - parameter_count(preset("deepseek-v3"))
    assert round(unique / 1e9, 1) == 11.6  # "11.5B unique parameters" in DeepSeek-V3's README_WEIGHTS


@pytest.mark.parametrize("tp", [1, 2])
def test_what_a_depth_keeps(tp: int) -> None:
    """Beside its layer: both norms' inputs, what eh_proj reads, the hidden states of both depths, and a loss more."""
    plain, found = (saved(asked(tp=tp, mtp_num_layers=depths)) for depths in (0, 1))
    sbh, statistics = 2 * ROWS * H // tp, 4 * ROWS // tp
    norms = 4 * (sbh + statistics)  # the final norm, enorm, hnorm and the depth's own: an input and its statistics
    assert found["mtp.0"] - plain["layers.3"] == norms + 2 * sbh + 8 * ROWS, "and ids of tokens"
    final_norm, joined = sbh + statistics, 2 * sbh
    softmax, mask, targets = 4 * ROWS * V // tp, ROWS, 8 * ROWS
    assert found["head"] - plain["head"] == softmax + mask + targets - final_norm + (joined - sbh)


def test_a_checkpoint_of_a_depth() -> None:
    """Behind the final norm, whose input and statistics stay: what it returned, the embedded tokens, and its result."""
    found = saved(asked(mtp_num_layers=1, recompute="full"))
    sbh = 2 * ROWS * H
    assert found["mtp.0"] == sbh + 4 * ROWS + 2 * sbh + 8 * ROWS


def test_the_last_stage_has_them_and_a_copy_of_the_embedding() -> None:
    plain, found = (asked(pp=2, mtp_num_layers=depths) for depths in (0, 1))
    assert [part.name for part in found.stages[1].parts[0]] == ["layers.2", "layers.3", "mtp.0", "head"]
    assert plain.stages[0].static == found.stages[0].static
    assert found.stages[1].static.parameters - plain.stages[1].static.parameters == 2 * (ADDED + V * H)
    alone = [asked(mtp_num_layers=depths).stages[0].static.parameters for depths in (0, 1)]
    assert alone[1] - alone[0] == 2 * ADDED, "the stage has the embedding already"
    typed = [asked(pp=2, mtp_num_layers=1, stage_layers=cut) for cut in ("3,1", "Et*3|tmL")]
    assert typed[0].peak_bytes == typed[1].peak_bytes
    assert typed[0].run == typed[1].run


def test_flops() -> None:
    plain, found = (asked(mtp_num_layers=depths).run for depths in (0, 1))
    scores = 4 * B * S * S * H
    added = 2 * ROWS * (4 * H * H + 3 * H * F + 2 * H * H + V * H) + scores
    assert forward_flops(found) - forward_flops(plain) == added
    assert model_flops(found) - model_flops(plain) == 3 * added


def test_gradients_of_the_shared_head_are_counted_once() -> None:
    """Its second contribution goes when it has been added; in buffers, the head's unit has none of its own."""
    one_by_one = asked(mtp_num_layers=1, gradients="one-by-one", micro_batches=2)
    assert one_by_one.stages[0].static.gradients == 2 * (parameter_count(one_by_one.run.model))
    assert one_by_one.worst.peak.nbytes == one_by_one.peak_bytes


def test_a_search_has_them_on_the_last_stage() -> None:
    space = SearchRequest(
        kernels="megatron", seq=S, mtp_num_layers=1, tp="1", pp="2", cp="1", zero="1", recompute="full"
    )
    whole = space.space(LLAMA, hardware("h100-80gb"), gpus=2, global_batch=2)
    setup = whole.setups[0]
    typed = RunRequest(
        kernels="megatron", seq=S, mtp_num_layers=1, pp=2, zero=1, micro_batch=setup.micro_batch,
        micro_batches=setup.micro_batches,
    )  # fmt: skip
    run = resolve(LLAMA, typed).run
    assert setup_run(setup, whole.template) == run


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kernels": "pytorch"}, "whose code does not build them: give --kernels megatron"),
        ({"loss": "chunked"}, "give vocab-parallel, native or te"),
    ],
)
def test_who_does_not_build_them(given: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        asked(mtp_num_layers=1, **given)


def test_a_configuration_that_has_them_says_how_they_are_counted() -> None:
    (remark,) = LLAMA.left_out
    assert "--mtp-num-layers" in remark
    assert not asked(mtp_num_layers=1).run.model.left_out


def test_golden_values_of_megatron() -> None:
    """The first iteration, later ones and between steps, in percent: what was found without a look back.

    Where lists send to the host the first iteration is left out: Megatron's sends everything while it learns what
    comes last (``post_warmup_callback``).
    """
    found = {}
    for row in megatron_golden.further_rows():
        errors = [100 * (p / m - 1) for p, m in zip(row.predicted(), row.measured, strict=True)]
        found[row.name.rpartition("etp1_")[2], row.gpu[:5]] = [round(error, 1) for error in errors]
    assert found["memory_speed", "H100-"] == [-1.5, -5.7, -0.8]
    assert found["selective_recompute_experimental", "H100-"] == [1.4, -2.5, -0.8]
    assert found["fine_grained_offloading", "GB200"][1:] == [-6.6, -0.8]
    assert found["fine_grained_offloading", "H100-"][1:] == [-7.0, -0.8]
