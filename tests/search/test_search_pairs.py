"""A search of pairs, and of exchanged heads, tries layouts and micro-batches that have them, and no others."""

from __future__ import annotations

import pytest

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.search.search import SearchRequest, search
from jettison.spec.hardware import hardware

H100 = hardware("h100-80gb")
LLAMA = parse_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 8,
        "vocab_size": 8192,
        "max_position_embeddings": 512,
    },
    name="two-layers",
)


def test_every_micro_batch_is_pairs() -> None:
    whole = SearchRequest(loss="dpo", reference="same").space(LLAMA, H100, gpus=4, global_batch=16)
    assert {(s.layout.dp, s.micro_batch) for s in whole.setups} == {(4, 2), (4, 4)}
    found = search(whole, H100).best
    setup = found.candidate.setup
    typed = RunRequest(
        loss="dpo", reference="same", dp=4, zero=setup.layout.zero, micro_batch=setup.micro_batch,
        micro_batches=setup.micro_batches, recompute=str(found.candidate.recompute),
    )  # fmt: skip
    assert forecast(resolve(LLAMA, typed).run).peak_bytes == found.figures.peak_bytes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tp": "2"}, "got --tp 2 with --loss dpo; its head is unsharded"),
        ({"cp": "1,2"}, "got --cp 1,2 with --loss dpo; its head is unsharded"),
        ({"micro_batch": "1,3"}, "got --loss dpo with --micro-batch 1,3; a pair is two sequences"),
    ],
)
def test_what_has_no_pairs_is_refused_in_words(given: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SearchRequest(loss="dpo", **given).space(LLAMA, H100, gpus=4, global_batch=16)


def test_ranks_that_exchange_heads_have_heads_each() -> None:
    """Eight heads: over sixteen ranks not all have one."""
    asked = SearchRequest(cp_comm_type="a2a", tp="1", pp="1")
    whole = asked.space(LLAMA, H100, gpus=16, global_batch=16)
    assert {setup.layout.cp for setup in whole.setups} == {1, 2, 4, 8}
