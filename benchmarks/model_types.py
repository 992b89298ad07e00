"""Every architecture: each `model_type` made small, described, and compared with its trace.

    PYTHONPATH=src:. python -m benchmarks.model_types [TYPE ...] [--write]

For each type: does it have a closed form, and are its parameters and what autograd saves those of the trace, to the
byte? Where it has none, is it recorded, with parameters and saved bytes of the trace, and a layout (two pipeline
stages, two replicas, ZeRO 3, recompute)? Else, which error refuses it? ``--write`` makes docs/architectures.md and
docs/architectures.csv of all of them.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

LAYERS, HEADS, HIDDEN, VOCABULARY, SEQUENCE, ROWS = 4, 4, 64, 128, 32, 2
SIZES: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embed_dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_query_groups"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 96),
    **dict.fromkeys(("ffn_hidden_size", "shared_intermediate_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 2 * SEQUENCE),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "attention_head_size"), HIDDEN // HEADS),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 32,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "max_target_positions": 2 * SEQUENCE,
}
"""What makes a configuration small, by key, wherever it has that key."""
_NAMES: Final = """
afmoe albert apertus arcee aya_vision bamba bart bert bigbird_pegasus biogpt bitnet bloom camembert clip codegen
cohere cohere2 cwm dbrx deberta-v2 deepseek_v2 deepseek_v3 deit dinov2 distilbert doge dots1 electra ernie4_5
ernie4_5_moe exaone4 falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3 gemma3_text gemma3n_text
gemma4_text glm glm4 glm4_moe glm4v gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe
granitemoehybrid granitemoeshared helium hubert hunyuan_v1_dense hunyuan_v1_moe idefics3 internlm3 internvl jais2 jamba
kimi_linear lfm2 lfm2_moe llama llama4 llama4_text llava llava_next longcat_flash mamba mamba2 mbart minimax
minimax_m2 ministral ministral3 mistral mistral3 mixtral modernbert mpt mt5 nemotron nemotron_h olmo olmo2 olmo3
olmoe opt paligemma persimmon phi phi3 phimoe qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5_moe_text qwen3_5_text
qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma roberta seed_oss siglip smollm3 stablelm starcoder2 t5
t5gemma umt5 vit wav2vec2 whisper xglm xlm-roberta zamba2
"""
TRIED: Final = tuple(_NAMES.split())
_LATENT: Final = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "num_key_value_heads": HEADS,
    "v_head_dim": 16,
    "head_dim": 8,
}
_SSM: Final = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
_THREE_AXES: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "bamba": {**_SSM, "attn_layer_indices": [1]},
    "clip": {"architectures": ["CLIPModel"]},
    "codegen": {"rotary_dim": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "hidden_size": HIDDEN, "moe_num_experts": 4, "moe_top_k": 2},
        "num_key_value_heads": 2,
    },
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "deepseek_v3": {**_LATENT, "n_group": 2, "topk_group": 1},
    "dinov2": {"stage_names": None, "out_features": None, "out_indices": None},
    "distilbert": {"dim": HIDDEN, "hidden_dim": 96},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {**_SSM, "mamba_d_ssm": 128},
    "gemma3n_text": {
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "intermediate_size": 96,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {"per_layer_config": None, "hidden_size_per_layer_input": 16},
    "glm4v": {"text_config": {"rope_parameters": _THREE_AXES, "head_dim": 16}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**_SSM, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        **_LATENT,
        "q_lora_rank": None,
        "linear_head_dim": 16,
        "linear_num_heads": HEADS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {**_LATENT, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16, "time_step_rank": 4},
    "llama4": {"text_config": {"no_rope_layers": None, "moe_layers": None}},
    "llama4_text": {"no_rope_layers": None, "moe_layers": None},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16},
    "qwen2_5_vl": {"text_config": {"rope_parameters": _THREE_AXES}},
    "qwen2_vl": {"text_config": {"rope_parameters": _THREE_AXES}},
    "smollm3": {"no_rope_layers": None},
    "zamba2": {
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 32,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "mamba_d_state": 16,
        "chunk_size": 16,
        "kv_channels": 16,
        "num_query_groups": HEADS,
        "num_key_value_heads": HEADS,
        "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
}
"""What a type needs beside that."""
CLOSED: Final = "closed form"
TOWER: Final = "closed form, tower's weights"
GROUPED: Final = ("deepseek_v3", "dots1", "glm4_moe", "nemotron_h", "phimoe")
ONE_CHUNK: Final = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
UNEXPLAINED: Final = ("gemma3n_text",)
UNTRACED: Final = ("dbrx",)
"""Held beside a real forward: their blocks look at values."""
NOTES: Final = {
    **dict.fromkeys(GROUPED, "the trace also counts a tensor of the router that is freed before the layer ends"),
    **dict.fromkeys(ONE_CHUNK, "the trace also counts a state that no later chunk reads and no real forward keeps"),
    **dict.fromkeys(UNEXPLAINED, "512 bytes above the trace, in the parts around the layers; why is not known"),
    **dict.fromkeys(UNTRACED, "compared with a real forward: routing reads values, which a trace does not have"),
}
PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "architectures.md"
TEMPLATE: Final = Path(__file__).parent / "pages" / "architectures.md"
ROWS_FILE: Final = PAGE.with_suffix(".csv")
COLUMNS: Final = ("model_type", "by", "parameters", "saved_bytes", "trace_saved_bytes", "layout", "peak_bytes", "note")
BESIDE: Final = {
    "torch_dtype",
    "dtype",
    "architectures",
    "transformers_version",
    "_name_or_path",
    "label2id",
    "id2label",
}


def tiny_config(kind: str) -> dict[str, Any]:
    """The configuration of a type, made small, as ``config.json`` would hold it."""
    from transformers import CONFIG_MAPPING

    values = _merged(_small(CONFIG_MAPPING[kind]().to_dict()), OWN.get(kind, {}))
    return json.loads(json.dumps({**values, "model_type": kind}))


def _merged(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """With its own values; those within a part of it belong there."""
    found = dict(values)
    for key, value in own.items():
        inner = isinstance(value, Mapping) and key.endswith("_config") and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if inner else value
    return {key: value for key, value in found.items() if key not in own or own[key] is not None}


def _small(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in BESIDE:
            continue
        if isinstance(value, dict):
            found[key] = _small(value)
        elif key in SIZES and value is not None:
            found[key] = SIZES[key]
        else:
            found[key] = value
    for key in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if isinstance(found.get(key), list):
            found[key] = found[key][:LAYERS]
    return found


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of a type.

    Args:
        way: "closed form", "trace", or "refused".
        parameters, saved: ours and the trace's, or those of a real forward where there is none.
        layout, peak_bytes: of a step with two replicas, and its peak.
        words: a refusal's, or what is said to be left out.
    """

    kind: str
    way: str
    parameters: tuple[int, int] = (0, 0)
    saved: tuple[int, int] = (0, 0)
    layout: str = ""
    peak_bytes: int = 0
    words: str = ""
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Parameters and saved bytes are the trace's."""
        return self.parameters[0] == self.parameters[1] and self.saved[0] == self.saved[1]

    @property
    def row(self) -> dict[str, str]:
        """Cells of the CSV, by column."""
        if self.way == "refused":
            return dict.fromkeys(COLUMNS, "") | {"model_type": self.kind, "by": self.way, "note": self.reason}
        figures = (self.parameters[0], *self.saved, self.layout, self.peak_bytes)
        return dict(zip(COLUMNS, map(str, (self.kind, self.way, *figures, NOTES.get(self.kind, ""))), strict=True))

    @property
    def reason(self) -> str:
        """First clauses of a refusal."""
        return self.words[:220].rpartition(",")[0]

    @property
    def line(self) -> str:
        """For a terminal."""
        same = "" if self.exact else f" DIFFERS: parameters {self.parameters}, saved {self.saved}"
        figures = f"{self.parameters[0]:>11,} {self.saved[0]:>12,} {self.seconds:5.1f}s"
        return f"{self.kind:22} {self.way:12} {figures}{same} [{self.layout}: {self.peak_bytes:,}] {self.words[:230]}"


def tried(kind: str) -> Answer:
    """Ask for one type."""
    from jettison.core.errors import JettisonError

    begin = time.process_time()
    try:
        values = tiny_config(kind)
        found = _answer(kind, values)
    except JettisonError as error:
        found = Answer(kind=kind, way="refused", words=str(error))
    return replace(found, seconds=time.process_time() - begin)


def _answer(kind: str, values: Mapping[str, Any]) -> Answer:
    from jettison.core.errors import NotDescribed, UsageError
    from jettison.families.config import TOWERS, parse_config
    from jettison.formula.region import parameter_count
    from jettison.models.recorded_models import recorded_model, with_towers
    from jettison.predict.forecast import forecast
    from jettison.request.options import RunRequest
    from jettison.request.resolve import resolve

    request = RunRequest(micro_batch=ROWS, precision="bf16-pure", kernels="huggingface")
    try:
        model, way = parse_config(values, name=kind), CLOSED
        request = replace(request, seq=SEQUENCE if model.words else None)
        if model.words and model.pair is None and any(values.get(f"{tower}_config") for tower in TOWERS):
            model, way = with_towers(model, values) or model, TOWER
    except NotDescribed:
        from jettison.models.huggingface import class_for, config_of, takes_tokens

        request = replace(request, kernels=None)
        if takes_tokens(class_for(config_of(values, kind))):
            request = replace(request, seq=SEQUENCE)
        model, way = recorded_model(values, request, name=kind), "trace"
    real = kind in UNTRACED and way != "trace"
    theirs, attention = _observed(values, kind) if real else _traced(values, kind, request.seq)
    if way != "trace":
        request = replace(request, attention=attention)
    run = resolve(model, request).run
    if way != "trace":
        run = replace(run, kernels=run.kernels.on_cpu())
    held = sum(part.region.saved_bytes for stage in forecast(run).stages for chunk in stage.parts for part in chunk)
    layout = replace(request, dp=2, zero=3, micro_batches=2, recompute="full")
    try:
        laid, stages = forecast(resolve(model, replace(layout, pp=2)).run), "pp 2, "
    except UsageError:
        laid, stages = forecast(resolve(model, layout).run), ""
    return Answer(
        kind=kind,
        way=way,
        parameters=(parameter_count(model), theirs[0]),
        saved=(held, theirs[1]),
        layout=f"{stages}dp 2, ZeRO 3, full",
        peak_bytes=laid.peak_bytes,
        words="; ".join(model.left_out),
    )


def _observed(values: Mapping[str, Any], kind: str) -> tuple[tuple[int, int], str]:
    """Parameters of transformers' model, and what autograd holds once a real forward of it is over."""
    import gc
    import weakref

    import torch

    from jettison.models.huggingface import class_for, config_of

    config = config_of(values, kind)
    torch.manual_seed(0)
    model = class_for(config)(config).to(torch.bfloat16).train()
    free = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    boxes: list[weakref.ref[Box]] = []

    def pack(tensor: Any) -> Box:
        box = Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    ids = torch.randint(1, VOCABULARY, (ROWS, SEQUENCE))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        loss = model(input_ids=ids, labels=ids.clone(), use_cache=False).loss
    gc.collect()
    storages = [box.tensor.untyped_storage() for ref in boxes if (box := ref()) is not None]
    sizes = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in free}
    del loss
    return (sum(p.numel() for p in model.parameters()), sum(sizes.values())), "sdpa"


class Box:
    """What autograd is handed in the place of a tensor."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def _traced(values: Mapping[str, Any], kind: str, seq: int | None) -> tuple[tuple[int, int], str]:
    """Parameters and saved bytes of transformers' model, and the attention that it is built with."""
    import torch

    from jettison.capture.blocks import find_blocks, only_blocks
    from jettison.capture.fake_copies import fake_mode
    from jettison.capture.ledger_entries import ledger_of
    from jettison.capture.tracer import trace_model
    from jettison.models.huggingface import ConfigRequest, batch_for, build, config_of

    config, mode = config_of(values, kind), fake_mode(allow_non_fake_inputs=True)
    asked = ConfigRequest(seq=seq, micro_batch=ROWS)
    model = build(config, asked, mode, dtype=torch.bfloat16)
    regions = None if find_blocks(model) else only_blocks(model)
    trace = trace_model(model, batch_for(model, config, asked), mode=mode, regions=regions)
    attention = "eager" if getattr(model.config, "_attn_implementation", "") == "eager" else "sdpa"
    return (sum(p.numel() for p in model.parameters()), ledger_of(trace).total_bytes()), attention


def asked_for(kind: str) -> Answer:
    """`tried`; a fault of ours becomes a row, too, to be found."""
    try:
        return tried(kind)
    except Exception as error:
        return Answer(kind=kind, way="FAULT", words=f"{type(error).__name__}: {error}")


def page(rows: Sequence[Answer]) -> str:
    """Return docs/architectures.md."""
    from transformers import __version__

    answered = [row for row in rows if row.way != "refused"]
    kinds = {way: ", ".join(f"`{row.kind}`" for row in rows if row.way == way) for way in (CLOSED, TOWER, "trace")}
    refused = "\n".join(f"- `{row.kind}`: {row.reason}." for row in rows if row.way == "refused")
    counts = {"tried": len(rows), "answered": len(answered), "equal": sum(row.exact for row in answered)}
    return TEMPLATE.read_text(encoding="utf-8").format(
        closed=kinds[CLOSED],
        towers=kinds[TOWER],
        traced=kinds["trace"],
        refused=refused,
        transformers=__version__,
        **counts,
    )


def write(rows: Sequence[Answer]) -> None:
    """Write the page and its rows."""
    PAGE.write_text(page(rows), encoding="utf-8")
    with ROWS_FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.row for row in rows)


def main() -> None:
    """Try them, and say what each gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    rows = []
    for kind in asked.types or TRIED:
        rows.append(asked_for(kind))
        print(rows[-1].line, flush=True)
    print(dict(Counter(row.way for row in rows)), f"{sum(row.exact for row in rows)} exact of {len(rows)}")
    if asked.write:
        write(rows)


if __name__ == "__main__":
    main()
