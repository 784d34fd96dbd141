"""Attention inside each item of a packed sequence: one signature, whatever kernel does the work.

Shape suffixes: T patches of all items, H heads, d width of a head.
"""

import importlib.util
import statistics
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

NUM_TIMINGS: Final = 7
LITTLE_WORK: Final = 1 << 21
"""Patches times those of the longest item."""


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """A kernel, the module that it comes from, and whether a graph of it can be captured and told other spans.

    cuDNN's form for packed sequences cannot: it makes a plan, on the host, for all lengths together, in each call.
    """

    name: str
    module: str
    load: Callable[[], AttentionKernel]
    fits_graphs: bool

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
            AttentionBackend("fa3", "fa3_fwd_interface", _load_fa3, True),
            AttentionBackend("flash-attn-4", "flash_attn.cute", _load_flash("flash_attn.cute"), True),
            AttentionBackend("flash-attn-3", "flash_attn_interface", _load_flash("flash_attn_interface"), True),
            AttentionBackend("flash-attn-2", "flash_attn", _load_flash("flash_attn"), True),
            AttentionBackend("cudnn", "torch", _load_cudnn, False),
            AttentionBackend("torch-varlen", "torch.nn.attention.varlen", _load_torch_varlen, True),
            AttentionBackend("triton", "triton", _load_triton, True),
            AttentionBackend("sdpa", "torch", _load_sdpa, False),
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


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The kernels, by their names in `BACKENDS`, of batches that are little work for attention, and of all others.

    Little work is a matter of latency, where FlashAttention-3 is not the fastest: on an H200, one layer of 1 x 1024
    patches takes 28 us with `fa3` and 22 with `triton`, 16 x 256 takes 40 and 31; 4 x 1024 takes 70 and 80, 4 x 4096
    takes 698 and 1053.
    """

    small: str
    large: str

    def load(self) -> AttentionKernel:
        """Return one kernel that is the one or the other. Raises `EncoderError` as `load_attention` does."""
        if self.small == self.large:
            return load_attention(self.small)
        small, large = load_attention(self.small), load_attention(self.large)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans) -> torch.Tensor:
            return (small if is_little_work(spans) else large)(q, k, v, spans)

        return attend

    def fits_graphs(self) -> bool:
        """Whether a graph of either can be told other spans."""
        return BACKENDS[self.small].fits_graphs and BACKENDS[self.large].fits_graphs


def is_little_work(spans: Spans) -> bool:
    """Decided by bounds of the batch, not by its spans, so that it is the same for all batches of a graph."""
    return spans.num_patches * spans.max_seqlen <= LITTLE_WORK


def measure_attention(qkv_T3Hd: torch.Tensor, mix: Sequence[Spans]) -> dict[str, float]:
    """Return the seconds that each kernel that works on this CUDA device takes for all batches of `mix`, fastest first.

    `qkv_T3Hd` has the rows of the largest batch. A kernel that the device refuses is left out.
    """
    found: dict[str, float] = {}
    for name, backend in BACKENDS.items():
        if not backend.is_installed():
            continue
        try:
            kernel = backend.load()
            found[name] = sum(_seconds(kernel, qkv_T3Hd, spans) for spans in mix)
        except (ImportError, RuntimeError, NotImplementedError):
            continue
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _seconds(kernel: AttentionKernel, qkv_T3Hd: torch.Tensor, spans: Spans) -> float:
    q, k, v = qkv_T3Hd[: spans.num_patches].unbind(1)
    kernel(q, k, v, spans)
    times = []
    for _ in range(NUM_TIMINGS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kernel(q, k, v, spans)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(times))
