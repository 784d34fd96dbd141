"""The forward pass as a GPU wants it: few kernels, each near its own floor, and nothing that waits for the device.

The arithmetic is `moonvit`'s, with four differences in rounding. The biases of layers that end in the residual stream
are not added there: every LayerNorm adds, in float32, the sum of those so far, so that the products can accumulate
into the stream. GELU is part of its product. Positions are added before the patch projection is rounded. Attention is
whichever kernel is given.

Shape suffixes: T patches of all items, N tokens, P values of a patch, D hidden width, H heads, d width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

import torch
from torch import nn

from encoder.attention import AttentionKernel
from encoder.kernels.rotary import bias_gelu_, rotate_
from encoder.kernels.rows import layer_norm, merge, place
from encoder.moonvit import Block, MoonViT
from encoder.spans import Spans

VALUES_MULTIPLE: Final = 8
"""Of a patch row, for loads of 16 bytes: 588 values become 592."""
DIRECT_TOKENS: Final = 768
"""Enough rows to fill a device with a product of their own. Copying instead costs 7 % of that product."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A block and the sums of biases that the residual stream lacks before its attention and before its MLP."""

    block: Block
    attention_offset: torch.Tensor
    mlp_offset: torch.Tensor


class DeviceForward:
    """Packed patch rows to embeddings, over the parameters of a `MoonViT` on a device, which are not copied.

    The parameters must not change afterwards: sums of biases are made of them.
    """

    def __init__(self, model: MoonViT, attention: AttentionKernel) -> None:
        """Prepare the small tensors that the pass needs beside the parameters."""
        tower, config = model.vision_tower, model.config
        self.config = config
        self.model = model
        self._attention = attention
        self.patch_values = -(-config.patch_values // VALUES_MULTIPLE) * VALUES_MULTIPLE
        padding = self.patch_values - config.patch_values
        self._patch_weight = nn.functional.pad(tower.patch_embed.proj.weight.detach().flatten(1), (0, padding))
        self._positions = tower.patch_embed.pos_emb.weight.detach()
        self._times = tower.patch_embed.pos_emb.frame_table()
        half = config.head_dim // 2
        steps = torch.arange(0, half, 2, dtype=torch.float32, device=self._positions.device) / half
        self._frequencies = 1.0 / config.rope_theta**steps
        self._layers, self._last_offset = _layers(model)
        self._qkv_shape = (-1, 3, config.num_heads, config.head_dim)

    @torch.inference_mode()
    def __call__(self, patches_TP: torch.Tensor, spans: Spans, outs: Sequence[torch.Tensor]) -> None:
        """Write each item's embedding into its own tensor of `outs`, contiguous `[num_tokens, text width]`.

        `patches_TP` are `[T, patch_values]` of this object, the values beyond a patch's own zero.
        """
        self.project(self.hidden(patches_TP, spans), spans.cu_tokens, outs)

    @torch.inference_mode()
    def hidden(self, patches_TP: torch.Tensor, spans: Spans, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return all but the last product: `[N, width of a merged token]`, those of padding behind all others.

        Given a contiguous `out` of that shape, it is written and returned.
        """
        x_TD, cosines, sines = place(spans, self._positions, self._times, self._frequencies)
        x_TD.addmm_(patches_TP, self._patch_weight.t())
        for layer in self._layers:
            self._block(layer, x_TD, cosines, sines, spans)
        tower, projector = self.model.vision_tower, self.model.mm_projector
        x_NC = merge(
            x_TD, spans, self._last_offset, tower.encoder.final_layernorm, projector.pre_norm, self.config.merge_size
        )
        x_NC = projector.proj[0](x_NC)
        return torch.ops.aten.gelu.out(x_NC, out=x_NC if out is None else out)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def project(self, hidden_NC: torch.Tensor, cu_tokens: Sequence[int], outs: Sequence[torch.Tensor]) -> None:
        """The last product, written where each embedding is wanted: by a product of its own for an item of many tokens,
        for neighbours of few by one product and one launch that copies."""
        last = self.model.mm_projector.proj[2]
        assert isinstance(last, nn.Linear), "the last layer's product is written into the outputs"
        parts = list(zip(pairwise(cu_tokens), outs, strict=False))
        for is_direct, run in groupby(parts, lambda part: len(parts) == 1 or len(part[1]) >= DIRECT_TOKENS):
            group = list(run)
            if is_direct:
                for (start, end), out in group:
                    torch.addmm(last.bias, hidden_NC[start:end], last.weight.t(), out=out)
            else:
                found = last(hidden_NC[group[0][0][0] : group[-1][0][1]])
                targets = [out for _, out in group]
                torch._foreach_copy_(targets, list(found.split([len(out) for out in targets])))

    def _block(
        self, layer: _Layer, x_TD: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, spans: Spans
    ) -> None:
        block = layer.block
        norm0, norm1, mlp = block.norm0, block.norm1, block.mlp
        h_TD = layer_norm(x_TD, layer.attention_offset, norm0.weight, norm0.bias, norm0.eps)
        qkv_T3Hd = block.wqkv(h_TD).view(self._qkv_shape)
        rotate_(qkv_T3Hd, cosines, sines)
        out_THd = self._attention(qkv_T3Hd[:, 0], qkv_T3Hd[:, 1], qkv_T3Hd[:, 2], spans)
        x_TD.addmm_(out_THd.flatten(1), block.wo.weight.t())
        h_TD = layer_norm(x_TD, layer.mlp_offset, norm1.weight, norm1.bias, norm1.eps)
        x_TD.addmm_(linear_gelu(h_TD, mlp.fc0), mlp.fc1.weight.t())


def linear_gelu(x_TD: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """Return the tanh GELU of a linear layer: in the product's own epilogue on CUDA, whose GELU is that one."""
    if x_TD.is_cuda and x_TD.dtype != torch.float32:
        out: torch.Tensor = torch.ops.aten._addmm_activation(linear.bias, x_TD, linear.weight.t(), use_gelu=True)
        return out
    return bias_gelu_(x_TD @ linear.weight.t(), linear.bias)


def _layers(model: MoonViT) -> tuple[list[_Layer], torch.Tensor]:
    """The blocks with their sums of biases, and the last such sum."""
    tower = model.vision_tower
    sum_D = _bias(tower.patch_embed.proj)
    layers = []
    for block in tower.encoder.blocks:
        assert isinstance(block, Block), "a tower is made of blocks"
        mlp_sum_D = sum_D + _bias(block.wo)
        layers.append(_Layer(block, sum_D, mlp_sum_D))
        sum_D = mlp_sum_D + _bias(block.mlp.fc1)
    return layers, sum_D


def _bias(layer: nn.Linear | nn.Conv2d) -> torch.Tensor:
    assert layer.bias is not None, "every layer of the tower has one"
    return layer.bias.detach().float()
