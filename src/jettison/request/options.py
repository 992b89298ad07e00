"""Request of a described run, as typed; `request.resolve` makes a `Run` of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from jettison.core.objects import non_defaults
from jettison.core.parse_units import Tokens


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CommonRequest:
    """Settings that one run shares with all candidates of a search; None is the default.

    Sections are the groups of ``--help`` and ``--help-all``; defaults: NOTE [ Defaults ] in `request.resolve`.

    Model:
        like: Framework preset, such as megatron-0.19 (`jettison list frameworks`).

    Batch and sequence:
        seq: Tokens in a sequence: 4096, 8k [default: the model's, at most 4096].

    Memory and GPU:
        precision: bf16, bf16-autocast, fp32, ... (`jettison list precisions`) [default: bf16; bf16-autocast with
            --lora].
        optimizer: adamw, adam8bit, muon, ... (`jettison list optimizers`) [default: adamw].

    Fine-tuning:
        lora: LoRA: r=16 and any of ,alpha=32 ,targets=mlp ,dropout=0.1 ,modules_to_save=lm_head.
        base: Frozen base: plain, fp32, nf4, nf4-double, int8, fp8 or gptq [default: the model's].

    Model details:
        model_type: The known model_type, such as qwen2, whose architecture a config.json of another type has.
        anchor: File of `jettison calibrate --out`: correct the answer by a measured run.

    Sequence details:
        source_seq: Tokens that the encoder of an encoder-decoder reads; audio samples [default: --seq, where it can].
        packed: Tokens of a document, where a sequence packs several that do not attend to each other [default: none].
        pad_to_longest: Micro-batches differ in length, up to --seq: cached blocks of one do not fit another.

    Kernels and numerics:
        kernels: Implementation of the layers: megatron, pytorch, pytorch-2.8 (or older), huggingface or
            huggingface-4.57, -4.48, -4.45, -4.30 (up to that version), torchtune, liger, foak, unsloth, axolotl,
            axolotl-liger, litgpt, llamafactory-v1 or nanotron [default: pytorch; gpt-22b to gpt-1t megatron].
        attention: eager, sdpa, flash, flex or flash-attn (the library, with its copies) [default: as --kernels].
        loss: upcast, in-loop, uncast, chunked-cross-entropy, in-place, compiled, dtensor, vocab-parallel, sharded,
            native, te, in-forward, fused, chunked, chunked-output, tiled or dpo [default: as --kernels].
        dropout: Dropout probability, wherever the architecture has dropout [default: the model's].
        workspaces: cuBLAS workspaces: none, torch-ampere, torch-hopper, torch-blackwell, te-ampere, te-hopper or
            te-blackwell (before pytorch#175344) [default: none].
        ssm_kernels: Kernels of state-space and linear-attention layers: eager or fused [default: eager].
        cuda_graphs: Replay layers as CUDA graphs, without launch overhead [default: as --kernels].
        stack: Software whose measured efficiency counts: base, megatron, megatron-deepspeed[-blocking], nemo,
            nemo-24.12, nemo-26.06, scaling or torch-2.11 [default: as --kernels].

    FP8 and FP4:
        fp8_recipe: Recipe of FP8/FP4 GEMMs, with --precision bf16. TransformerEngine: delayed[:N], tensorwise (either
            with -blackwell), blockwise, mxfp8, nvfp4; torchao: tensorwise, rowwise, rowwise_with_gw_hp, mxfp8.
        fp8_param_gather: Store weights in FP8 (Megatron), or all-gather them in FP8 (torchao tensorwise).
        quant_recipe: Layers and GEMMs with a recipe other than --fp8-recipe: last:14=bf16,mtp=bf16,attention.*=bf16,
            out_proj=mxfp8; the first glob that matches counts.

    Gradients:
        gradients: Allocation of gradients: one-by-one (in backward), upfront (Megatron's buffers), buckets (DDP),
            fp32-accumulator (nanotron) or in-backward (optimizer step in backward) [default: as --kernels].
        accumulation: Gradient accumulation: autograd, cast (of each), fused or fused-dummy [default: autograd].

    Mixture of experts:
        dispatcher: Token dispatch to experts: alltoall, flex (DeepEP, HybridEP) or allgather [default: as --kernels].
        capacity_factor: Expert capacity, as a multiple of an even share of tokens [default: no token is dropped].
        expert_imbalance: Tokens of the busiest rank's experts, as a multiple of an even share [default: 1].
        sequential_experts: Run experts one after the other instead of as grouped GEMMs.
        ep_comm_overlap: Overlap expert all-to-alls with compute of another micro-batch (time only).

    Multi-token prediction:
        mtp_num_layers: Multi-token prediction (MTP) layers, as Megatron's flag [default: 0].
        mtp_use_repeated_layer: Share one MTP layer's weights among all depths.

    Megatron-Core:
        recompute_modules: Modules that are recomputed: core_attn,layernorm,mla_up_proj,mlp,moe_act,shared_experts,moe.
        offload_modules: Modules whose activations are offloaded: attn_norm,qkv_linear,core_attn,attn_proj,mlp_norm,
            expert_fc1,moe_act.
        tp_comm_overlap: Overlap tensor-parallel communication with GEMMs (time only).
        deterministic: Deterministic mode: outputs of experts are kept, too.
        dataloader_attention_mask: The data loader makes an s x s attention mask for each sequence (Megatron's default).
        keep_batches: All micro-batches of a step stay on the device until it ends (Megatron 0.18).

    FSDP and torchtitan:
        fsdp_version: With --zero 3: 2 (FSDP2) or 1 (flat parameters) [default: 2].
        reshard_after_forward: With --zero 3: always, never, torchtitan (its default policy), or over how many ranks
            [default: always].
        gradient_sync: With --zero 3, gradients are reduce-scattered in each micro-batch, or in the last of a step and
            are unsharded until then (no_sync, set_requires_gradient_sync(False)) [default: each].
        reduce_dtype: With --zero 3, dtype that gradients are reduced in: fp32, bf16, or compute (that of compute)
            [default: as --precision keeps gradients].
        fsdp_wrap_layers_only: Embedding, final norm and head stay in the root FSDP module, unsharded for the step.
        fsdp_one_unit: With --fsdp-version 1: the model is one FSDP unit, without an auto-wrap policy (NO_WRAP).

    DeepSpeed and CPU offload:
        zero_buckets: Live parameters and gradient buckets of ZeRO, in elements: default, none, or any of live=1e9,
            reuse=1e9,prefetch=5e7,persist=1e5,reduce=5e8,buckets=1,sub-group=1e9; auto: by the hidden size [default:
            none].
        offload_optimizer: Optimizer states in CPU memory: deepspeed (ZeRO-Offload), torchao, torchao-gradients or
            bitsandbytes (paged); with parameters: deepspeed-parameters, fsdp2 or fsdp1 [default: none].

    transformers, TRL and PEFT:
        reentrant: Checkpoints use use_reentrant=True, outside FSDP's wrapping (transformers before 4.52).
        keep_logits: The loop references the model's output, logits included, until backward ends.
        adapter_dtype: Dtype of adapters: fp32 (PEFT's autocast_adapter_dtype) [default: as --precision].
        kbit_upcast: fp32 upcast over a 4-bit base: all (prepare_model_for_kbit_training), norms (TRL up to 0.26) or
            none [default: none].
        input_gradients: The frozen embedding's output requires grad [default: where layers are recomputed].
        reference: Frozen reference model, as of DPO: same, base (adapters off) or a model, with
            ,dtype=bf16,sharded=no,when=before [default: none].
        reward: Frozen reward model with one score a token: same or a model [default: none].

    Parallelism details:
        cp_comm_type: Context-parallel attention: ring, p2p, gather or a2a [default: as --kernels].
        gathered_inputs: Save all-gathered inputs under sequence parallelism, as stock DTensor does.
        keep_stage_outputs: Pipeline stages keep outputs that they have sent.
        keep_received: Pipeline chunks keep the last received activation and its gradient.
        stage_buffers: Preallocate receive buffers for all micro-batches, as torch.distributed.pipelining does.
    """

    seq: Tokens | None = None
    source_seq: Tokens | None = None
    attention: str | None = None
    dropout: float | None = None
    precision: str | None = None
    fp8_recipe: str | None = None
    fp8_param_gather: bool | None = None
    quant_recipe: str | None = field(default=None, metadata={"former": "products"})
    optimizer: str | None = None
    kernels: str | None = None
    loss: str | None = None
    capacity_factor: float | None = None
    expert_imbalance: float | None = None
    dispatcher: str | None = None
    sequential_experts: bool | None = None
    deterministic: bool | None = None
    tp_comm_overlap: bool | None = None
    ep_comm_overlap: bool | None = None
    cuda_graphs: bool | None = None
    stack: str | None = None
    gathered_inputs: bool | None = None
    keep_stage_outputs: bool | None = None
    gradients: str | None = None
    accumulation: str | None = None
    workspaces: str | None = None
    keep_received: bool | None = None
    stage_buffers: bool | None = None
    reshard_after_forward: str | None = None
    gradient_sync: str | None = None
    reduce_dtype: str | None = None
    fsdp_wrap_layers_only: bool | None = field(default=None, metadata={"former": "outer_ends"})
    fsdp_one_unit: bool | None = None
    fsdp_version: int | None = None
    zero_buckets: str | None = None
    reentrant: bool | None = None
    adapter_dtype: str | None = field(default=None, metadata={"former": "adapters"})
    dataloader_attention_mask: bool | None = field(default=None, metadata={"former": "loader_masks"})
    keep_batches: bool | None = None
    keep_logits: bool | None = field(default=None, metadata={"former": "holds_output"})
    ssm_kernels: str | None = field(default=None, metadata={"former": "scans"})
    cp_comm_type: str | None = field(default=None, metadata={"former": "context_exchange"})
    packed: Tokens | None = None
    pad_to_longest: bool | None = None
    lora: str | None = None
    base: str | None = None
    kbit_upcast: str | None = None
    input_gradients: bool | None = None
    reference: str | None = None
    reward: str | None = None
    offload_optimizer: str | None = field(default=None, metadata={"former": "states_on_host"})
    mtp_num_layers: int | None = None
    mtp_use_repeated_layer: bool | None = None
    recompute_modules: str | None = None
    offload_modules: str | None = None
    model_type: str | None = field(default=None, metadata={"former": "family"})
    like: str | None = None
    anchor: str | None = field(default=None, metadata={"local": True})

    def __repr__(self) -> str:
        return non_defaults(self)

    def given(self) -> tuple[str, ...]:
        """Names of the fields that were."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunRequest(CommonRequest):
    """Settings of one training run.

    Batch and sequence:
        micro_batch: Sequences in a micro-batch [default: 1].
        micro_batches: Micro-batches in a step, of one replica [default: --pp].

    Parallelism:
        tp: Tensor-parallel ranks [default: 1].
        pp: Pipeline stages [default: 1].
        cp: Context-parallel ranks [default: 1].
        ep: Expert-parallel ranks, out of dp x cp [default: 1].
        dp: Data-parallel replicas [default: 1].
        zero: ZeRO stage: 1 optimizer states, 2 gradients, 3 parameters (FSDP) [default: 0].

    Recompute and offload:
        recompute: none, selective, full, auto, ... (`jettison list policies`) [default: none].
        offload: Offload saved activations to CPU until backward [default: no, but `plan --gpu` may].

    Parallelism details:
        sp: Sequence parallelism with tensor parallelism [default: where --tp is above 1].
        schedule: Pipeline schedule: gpipe, 1f1b, zero-bubble or zero-bubble-v [default: 1f1b].
        virtual_stages: Virtual stages on each pipeline rank (interleaved 1F1B) [default: 1].
        stage_layers: Layers of each stage: 5,4,4,3, first:3,last:5, Megatron's layout or nanotron [default: even].
        micro_batches_without_recompute: Of those in flight: a number, or most (as many as fit) [default: 0].
        micro_batch_group: Megatron's --microbatch-group-size-per-virtual-pipeline-stage [default: --pp].
        wgrad_deferral_limit: Megatron's limit, with --defer-embedding-wgrad-compute [default: 0, no deferral].
        expert_tp: Tensor-parallel ranks of experts; --ep takes the others [default: --tp].
        zero_replicas: Replicas of what ZeRO shards, as in HSDP [default: 1].
        zero_redundancy_optimizer: With --zero 1: shard optimizer states by whole parameter, as torch's class.

    Sequence details:
        max_position_embeddings: Rows of learned positions, for longer sequences than the model's [default: its own].
    """

    micro_batch: int | None = None
    micro_batches: int | None = None
    tp: int | None = None
    sp: bool | None = None
    pp: int | None = None
    virtual_stages: int | None = None
    micro_batch_group: int | None = None
    wgrad_deferral_limit: int | None = field(default=None, metadata={"former": "deferred_head"})
    stage_layers: str | None = None
    schedule: str | None = None
    cp: int | None = None
    dp: int | None = None
    ep: int | None = None
    expert_tp: int | None = None
    zero: int | None = None
    zero_replicas: int | None = None
    zero_redundancy_optimizer: bool | None = field(default=None, metadata={"former": "zero_whole"})
    recompute: str | None = None
    offload: bool | None = None
    micro_batches_without_recompute: str | None = field(default=None, metadata={"former": "whole_micro_batches"})
    max_position_embeddings: Tokens | None = field(default=None, metadata={"former": "positions"})


OF_FSDP = (
    *("fsdp_wrap_layers_only", "fsdp_one_unit", "reshard_after_forward", "fsdp_version", "gradient_sync"),
    "reduce_dtype",
)
"""Settings of FSDP, which need --zero 3."""
NOTHING_ASKED = RunRequest()
DECIDED = ("recompute", "recompute_modules", "offload", "offload_modules", "micro_batches_without_recompute")
"""Fields that a plan decides."""
