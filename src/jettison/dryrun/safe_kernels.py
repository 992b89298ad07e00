"""Which kernels may be called in the user's own process with made-up values.

A kernel that trusts its arguments (lengths, offsets, a workspace that another call filled) can end the process on
values that no training step would give it. What is listed here indexes with nothing but shapes, or with indices that it
checks; so do operators that torch tags as pointwise, as reductions or as core. Everything else is priced in a process
of its own (`worker.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from jettison.capture.op_traits import is_communication
from jettison.capture.sparse_fakes import makes_sparse

_TAGS = tuple(
    getattr(torch.Tag, name) for name in ("core", "pointwise", "reduction", "view_copy") if hasattr(torch.Tag, name)
)
_NOT_SAFE = frozenset({"_embedding_bag", "_pdist_forward", "grid_sampler_2d"})
"""Tagged as above, but they read lengths or positions out of their arguments."""

_BY_SHAPE = """
    _addmm_activation _cdist_backward _euclidean_dist _fused_rms_norm _fused_rms_norm_backward _grouped_mm _int_mm
    _log_softmax_backward_data _masked_scale _prelu_kernel _prelu_kernel_backward _reshape_alias _reshape_copy
    _safe_softmax _softmax_backward_data _unsafe_view _weight_norm_interface _weight_norm_interface_backward
    _fft_c2c _native_batch_norm_legit_functional _batch_norm_with_update _batch_norm_no_update absolute addbmm addmm
    addmv addr arange as_strided avg_pool3d_backward baddbmm batch_norm_backward bernoulli binary_cross_entropy
    binary_cross_entropy_backward block_diag cauchy complex conj copy copysign cudnn_batch_norm
    cudnn_batch_norm_backward cummax cummin cumprod cumsum detach diag diag_embed diagonal_backward diagonal_scatter
    dist divide dot elu_backward empty_like empty_permuted exponential eye fill floor_divide geometric glu
    glu_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward huber_loss huber_loss_backward
    im2col imag kthvalue leaky_relu_backward lift lift_fresh linalg_cross linspace log_normal log_sigmoid_backward
    log_sigmoid_forward logcumsumexp logspace masked_fill matmul median miopen_batch_norm miopen_batch_norm_backward
    mish mish_backward mse_loss mse_loss_backward multiply mv native_batch_norm native_batch_norm_backward new_empty
    new_empty_strided new_full new_ones new_zeros normal ones ones_like polar prelu rand_like randint randint_like
    randn_like real reflection_pad1d_backward reflection_pad2d_backward replication_pad1d replication_pad1d_backward
    replication_pad2d_backward roll rrelu_with_noise rrelu_with_noise_backward rrelu_with_noise_functional
    select_backward slice_backward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward
    softplus_backward split stack subtract t threshold_backward to trace transpose tril tril_indices triu
    triu_indices unbind unfold unfold_backward uniform unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze
    upsample_linear1d upsample_nearest1d upsample_nearest2d_backward vdot view_as_complex view_as_real zero zeros
    zeros_like _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    upsample_bicubic2d _to_dense _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _convolution
"""
"""What they read and write hangs on shapes alone."""

_BY_INDEX = """
    _unsafe_index _unsafe_index_put bincount bucketize index_add index_copy index_fill index_put index_reduce
    masked_scatter masked_scatter_backward masked_select multinomial nll_loss nll_loss2d_backward nll_loss2d_forward
    nll_loss_backward nll_loss_forward nonzero_static one_hot repeat_interleave scatter scatter_add scatter_reduce
    searchsorted take _unique2 unique_consecutive unique_dim
"""
"""They check their indices, and zeros are valid ones (the offsets of a grouped product are made up to fit)."""

_SAFE = frozenset(_BY_SHAPE.split()) | frozenset(_BY_INDEX.split())


def is_safe(func: Any) -> bool:
    """Whether calling this kernel on made-up values can at worst raise."""
    namespace, name = func._schema.name.split("::")
    if namespace == "jettison":  # ours, of kernels that are
        return True
    if namespace != "aten" or name in _NOT_SAFE:
        return False
    return name.removesuffix("_") in _SAFE or name in _SAFE or any(tag in func.tags for tag in _TAGS)


@cache
def has_no_workspace(func: Any) -> bool:
    """Whether a call can take no memory beside its results: views, giving a tensor another storage or no history, an
    optimizer's in-place work over lists, marks of the profiler, questions for a tensor's device, the empty memory of
    dry runs, what talks to other ranks (they may not be asking, and each call names an object of its own).
    """
    name = func._schema.name
    return (
        bool(func.is_view)
        or name == "aten::detach_"
        or makes_sparse(func)
        or is_communication(func)
        or name.startswith(
            (
                "aten::_foreach_",
                "aten::_fused_adam",
                "aten::_fused_sgd",
                "aten::new_empty_strided",
                "aten::set_",
                "profiler::",
                "prim::",
            )
        )
    )
