"""What ranks do for tests/parallel/test_parallel_parity.py, each beside a whole model in its own process."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as checkpoints
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import jettison
from jettison.models.reference import Gpt, GptConfig, Llama, LlamaConfig
from jettison.parallel import apply_tensor_parallel, reduce_partial_gradients, seed_ranks
from jettison.parallel.tp_collectives import Axis
from support.collective_counts import CollectiveBytes
from support.rank_masks import fix_masks

S, B, V = 16, 2, 51  # 51 divides by neither 2 nor 4
GPT = GptConfig(layers=2, hidden=32, heads=4, vocab=V, positions=S, dropout=0.3)
LLAMA = LlamaConfig(layers=2, hidden=32, heads=8, kv_heads=4, head_dim=4, ffn=48, vocab=V)


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))


def shaken(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Every parameter away from where it starts: norms' weights of 1 and biases of 0 hide mistakes."""
    torch.manual_seed(0)
    model = model.to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, V, (B, S), generator=generator) for _ in range(2))  # type: ignore[return-value]


def gathered(tensor: Tensor | None, like: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().reshape(like.shape)


def parity(
    make: Callable[[], nn.Module],
    mesh: DeviceMesh,
    *,
    sp: bool,
    step: Callable[[nn.Module], Tensor],
    dtype: torch.dtype,
    masks: bool = False,
) -> dict[str, Any]:
    """Loss and gradients of a parallel model, gathered, beside those of a whole copy made before."""
    torch.manual_seed(0)
    model = shaken(make(), dtype)
    whole = copy.deepcopy(model)
    if masks:
        fix_masks(whole, GPT.heads)
    expected = step(whole)
    expected.backward()
    apply_tensor_parallel(model, mesh, sequence_parallel=sp)
    if masks:
        fix_masks(model, GPT.heads, Axis.of(mesh), sp=sp)
    with CollectiveBytes() as step_sent:
        loss = step(model)
        loss.backward()
    partial = [n for n, p in model.named_parameters() if p.grad is not None and p.grad.placements[0].is_partial()]
    lazily = {n: gathered(p.grad, p) for n, p in model.named_parameters()}
    with CollectiveBytes() as sent:
        reduce_partial_gradients(model.parameters())
    found = {name: gathered(p.grad, p) for name, p in model.named_parameters()}
    reference = {name: p.grad for name, p in whole.named_parameters()}
    assert found.keys() == reference.keys()
    return {
        "loss": [expected.item(), loss.item()],
        "gradients": {n: [gap(found[n], g), g.abs().max().item()] for n, g in reference.items()},
        "lazily": max(gap(lazily[n], g) for n, g in reference.items()),
        "values": max(gap(gathered(p, p), dict(whole.named_parameters())[n]) for n, p in model.named_parameters()),
        "partial": partial,
        "reductions": sum(sent.calls.values()),
        "sent": {f"{t.kind} {'backward' if t.backward else 'forward'}": n for t, n in step_sent.nbytes.items()},
    }


def gap(found: Tensor, expected: Tensor) -> float:
    return (found.reshape(expected.shape) - expected).abs().max().item()


# checks: parity ------------------------------------------------------------------------------------------------------


def reference_parity(_: Any) -> dict[str, Any]:
    mesh, (ids, labels) = tp_mesh(), batch()
    found = {}
    for sp in (False, True):
        for dtype in (torch.float64, torch.float32):
            for name, make in (("gpt", lambda: Gpt(GPT)), ("llama", lambda: Llama(LLAMA))):
                key = f"{name} {'tp_sp' if sp else 'tp'} {dtype}"
                found[key] = parity(make, mesh, sp=sp, step=lambda m: m(ids, labels), dtype=dtype, masks=name == "gpt")
    return found


def huggingface_configs() -> dict[str, Any]:
    """Two layers each; GPT-2 with dropout in eager attention."""
    import transformers

    shared = {"vocab_size": V, "attn_implementation": "sdpa"}
    small = dict(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=4,
        intermediate_size=48,
        max_position_embeddings=S,
        **shared,
    )
    gpt2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": S, "vocab_size": V, "embd_pdrop": 0.2}
    return {
        "llama": transformers.LlamaConfig(**small),
        "mistral": transformers.MistralConfig(sliding_window=4, **small),
        "qwen2": transformers.Qwen2Config(pad_token_id=3, **small),
        "qwen3": transformers.Qwen3Config(tie_word_embeddings=True, **small),
        "gpt2": transformers.GPT2Config(resid_pdrop=0.2, attn_pdrop=0.2, attn_implementation="eager", **gpt2),
    }


def from_config(config: Any) -> nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(config)


def huggingface(_: Any) -> dict[str, Any]:
    """Models of transformers beside whole ones, in evaluation, where nothing is drawn; with plans beside without."""
    ids, _labels = batch()
    mesh, configs = tp_mesh(), huggingface_configs()
    found: dict[str, Any] = {
        f"{name} {'tp_sp' if sp else 'tp'}": parity(
            lambda config=config: from_config(config),
            mesh,
            sp=sp,
            step=lambda m: m.eval()(input_ids=ids, labels=ids).loss,
            dtype=torch.float64,
        )
        for name, config in configs.items()
        for sp in (False, True)
        if name in FAMILIES[mesh.size()]
    }
    found["plans"] = {
        f"{name} {'tp_sp' if sp else 'tp'} {policy}{' autocast' if autocast else ''}": planned(
            configs[name], mesh, policy, sp=sp, autocast=autocast
        )
        for name, policy, sp, autocast in PLANNED[mesh.size()]
    }
    if mesh.size() == 4:
        found["checkpoint"] = _checkpoint_of_two_read_by_four(configs["gpt2"])
    return found


def more_plans(_: Any) -> dict[str, Any]:
    """Models of transformers on two ranks with the plans that `huggingface` leaves out."""
    mesh, configs = tp_mesh(), huggingface_configs()
    return {
        f"{name} {policy} {sp=}": planned(configs[name], mesh, policy, sp=sp, autocast=False)
        for name, policy, sp in MORE_PLANS
    }


FAMILIES = {2: ("llama", "mistral", "qwen2", "qwen3", "gpt2"), 4: ("llama", "gpt2")}
"""By number of ranks."""
PLANNED = {
    2: [
        ("llama", "full", True, True),
        ("llama", "every:2", True, False),
        ("qwen3", "selective-op", True, False),
        ("gpt2", "full", True, False),
        ("gpt2", "selective", False, False),
    ],
    4: [("llama", "full", True, False), ("qwen3", "every:2", True, False), ("gpt2", "full", True, False)],
}
"""By number of ranks: model, policy, with sequence parallelism?, under autocast?"""
MORE_PLANS = [
    *((name, policy, True) for name in ("llama", "qwen2") for policy in ("full", "selective-op")),
    ("qwen3", "full", True),
    ("llama", "full", False),
    ("mistral", "full", True),
    *(("gpt2", policy, sp) for policy in ("full", "selective", "selective-op") for sp in (True, False)),
]


def planned(config: Any, mesh: DeviceMesh, policy: str, *, sp: bool, autocast: bool) -> dict[str, Any]:
    """A model of transformers, sharded by its structure, with a policy and without; GPT-2 with dropout."""
    ids, labels = batch()
    model = shaken(from_config(config), torch.float32)
    apply_tensor_parallel(model, mesh, sequence_parallel=sp)
    inputs = {"input_ids": ids, "labels": labels}

    def two_steps() -> list[Tensor]:
        seed_ranks(5, mesh, sequence_parallel=sp)
        for _step in range(2):
            model.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
        return [loss.detach(), torch.get_rng_state(), *(p.grad.to_local().clone() for p in model.parameters())]

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        plain = two_steps()
        with jettison.apply(model, policy, batch=inputs) as applied:
            found = two_steps()
            reports = applied.report()
    return {
        "same": all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)),
        "dropped": sum(report.slots_dropped for report in reports),
        "fallbacks": [report.fallback for report in reports if report.fallback],
        "recordings": max(report.recordings for report in reports),
    }


def _checkpoint_of_two_read_by_four(config: Any) -> float:
    """Largest difference of a parameter after a distributed checkpoint has changed the number of ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(mesh["tp"].get_local_rank())  # the values of the axis' first rank count
    two = apply_tensor_parallel(from_config(config), mesh["tp"])
    four = apply_tensor_parallel(from_config(config), tp_mesh())
    folder = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(folder)
    checkpoints.save({"model": two.state_dict()}, checkpoint_id=folder[0])
    state = {"model": four.state_dict()}
    checkpoints.load(state, checkpoint_id=folder[0])
    four.load_state_dict(state["model"])
    distributed.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    values = dict(two.named_parameters())
    return max(gap(gathered(p, p), gathered(values[n], p)) for n, p in four.named_parameters())


def training_parity(_: Any) -> dict[str, float]:
    """Largest difference of a parameter after clipped steps of AdamW, with gradients left Partial and made whole."""
    mesh, (ids, labels) = tp_mesh(), batch()

    def train(model: nn.Module, *, reduce: bool) -> nn.Module:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for _step in range(3):
            optimizer.zero_grad()
            for _micro_batch in range(2):
                model(ids, labels).backward()
            if reduce:
                reduce_partial_gradients(model.parameters())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
            optimizer.step()
        return model

    foreach = False if torch.__version__.startswith("2.11.") else None  # else Partial gradients are not scaled there
    config = replace(GPT, dropout=0.0)
    torch.manual_seed(0)
    start = shaken(Gpt(config), torch.float64)
    whole = dict(train(copy.deepcopy(start), reduce=False).named_parameters())
    found = {}
    for reduce in (False, True):
        model = train(apply_tensor_parallel(copy.deepcopy(start), mesh), reduce=reduce)
        found[f"reduce={reduce}"] = max(gap(gathered(p, p), whole[n]) for n, p in model.named_parameters())
    return found


def reference(_: Any) -> dict[str, Any]:
    """The models of record."""
    found: dict[str, Any] = {"parity": reference_parity(_)}
    if distributed.get_world_size() > 1:
        found["training"] = training_parity(_)
    return found
