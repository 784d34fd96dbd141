"""Attention inside each item of a packed sequence: one signature, whatever kernel does the work.

Shape suffixes: T patches of all items, H heads, d width of a head.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from torch import nn

from encoder.errors import EncoderError
from encoder.spans import Spans

AttentionKernel: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Spans], torch.Tensor]
"""Takes q, k and v, parts of one `[T, 3, H, d]`; returns softmax(q k' / sqrt(d)) v within each span, `[T, H, d]`."""


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """A kernel and the module that it comes from.

    `fits_graphs`: a graph of it can be captured and told other spans. `is_quick`: it is worth to be measured; cuDNN's
    form for packed sequences makes a plan for all lengths together in each call, on the host, which takes 50 ms.
    """

    name: str
    module: str
    load: Callable[[], AttentionKernel]
    fits_graphs: bool = True
    is_quick: bool = True

    def is_installed(self) -> bool:
        """Whether the kernel's module is there; the device may still refuse it."""
        root = self.module.partition(".")[0]
        return importlib.util.find_spec(root) is not None and importlib.util.find_spec(self.module) is not None


def packed_attention(
    q_THd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, cu_seqlens: Sequence[int]
) -> torch.Tensor:
    """Return softmax(q k' / sqrt(d)) v, full and bidirectional within each item, as a new `[T, H, d]`.

    `cu_seqlens` are host ints from 0 to T, so no device is read. The inputs may be strided views as long as their last
    dimension is dense. Memory is linear in the items' lengths: there is no mask.
    """
    assert cu_seqlens[-1] == q_THd.shape[0], "cu_seqlens ends where the packed sequence ends"
    outs = [_attend(q_THd[a:b], k_THd[a:b], v_THd[a:b]) for a, b in pairwise(cu_seqlens) if a < b]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend(q_nHd: torch.Tensor, k_nHd: torch.Tensor, v_nHd: torch.Tensor) -> torch.Tensor:
    q, k, v = (x_nHd.transpose(0, 1).unsqueeze(0) for x_nHd in (q_nHd, k_nHd, v_nHd))
    return nn.functional.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)


def _load_sdpa() -> AttentionKernel:
    return lambda q, k, v, spans: packed_attention(q, k, v, spans.cu_seqlens)


def _load_fa3() -> AttentionKernel:
    importlib.import_module("fa3_fwd_interface")
    forward = torch.ops.fa3_fwd.fwd

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans) -> torch.Tensor:
        cu, longest = spans.cu_seqlens_device, spans.max_seqlen
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
        out: torch.Tensor = forward(q, k, v, **lengths, softmax_scale=q.shape[-1] ** -0.5, num_splits=1)[0]
        return out

    return attend


def _load_flash(module: str) -> Callable[[], AttentionKernel]:
    def load() -> AttentionKernel:
        function = importlib.import_module(module).flash_attn_varlen_func

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans) -> torch.Tensor:
            cu, longest = spans.cu_seqlens_device, spans.max_seqlen
            found = function(
                q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest
            )  # fmt: skip
            out: torch.Tensor = found[0] if isinstance(found, tuple) else found
            return out

        return attend

    return load


def _load_torch_varlen() -> AttentionKernel:
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans) -> torch.Tensor:
        cu, longest = spans.cu_seqlens_device, spans.max_seqlen
        out: torch.Tensor = function(q, k, v, cu, cu, longest, longest)
        return out

    return attend


def _load_cudnn() -> AttentionKernel:
    forward = torch.ops.aten._cudnn_attention_forward  # the varlen form of cuDNN's has no public name

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans) -> torch.Tensor:
        cu, longest = spans.cu_seqlens_device, spans.max_seqlen
        out: torch.Tensor = forward(q, k, v, None, cu, cu, longest, longest, False)[0]
        return out

    return attend


def _load_triton() -> AttentionKernel:
    from encoder.kernels.flash import flash_attention

    return flash_attention


BACKENDS: Final[Mapping[str, AttentionBackend]] = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            AttentionBackend("fa3", "fa3_fwd_interface", _load_fa3),
            AttentionBackend("flash-attn-4", "flash_attn.cute", _load_flash("flash_attn.cute")),
            AttentionBackend("flash-attn-3", "flash_attn_interface", _load_flash("flash_attn_interface")),
            AttentionBackend("flash-attn-2", "flash_attn", _load_flash("flash_attn")),
            AttentionBackend("cudnn", "torch", _load_cudnn, fits_graphs=False, is_quick=False),
            AttentionBackend("torch-varlen", "torch.nn.attention.varlen", _load_torch_varlen),
            AttentionBackend("triton", "triton", _load_triton),
            AttentionBackend("sdpa", "torch", _load_sdpa, fits_graphs=False),
        )
    }
)


def load_attention(name: str) -> AttentionKernel:
    """Return the kernel of that name. Raises `EncoderError` if there is none of it, or not here."""
    backend = BACKENDS.get(name)
    if backend is None:
        raise EncoderError(f"attention {name!r}: must be one of {', '.join(BACKENDS)}")
    if not backend.is_installed():
        raise EncoderError(f"attention {name}: {backend.module} is not installed")
    return backend.load()
