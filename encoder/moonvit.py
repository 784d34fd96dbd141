"""The packed MoonViT-3D forward and its projector, for inference only.

Submodules bear the names of the original checkpoint, so a parameter's path in `MoonViT` is its name on disk.
Shape suffixes: T patches, N tokens, D hidden width, H heads, d width of a head, c pairs of a head, C width of a
merged token.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import nn

from encoder.attention import packed_attention
from encoder.config import EncoderConfig
from encoder.packing import PackPlan, plan_pack
from encoder.sizing import Grid

ROW_MULTIPLE: Final = 4
"""Products of very few rows, and the last rows of others, may take another kernel, whose sums are ordered otherwise.
Patches always are a multiple of four; tokens are padded up to one, so that the smallest items differ by their company
no more than others do."""


class MoonViT(nn.Module):
    """Vision tower and projector. Parameters are as constructed by the ambient default; `weights` fills them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = VisionTower(config)
        self.mm_projector = Projector(config)

    @torch.inference_mode()
    def forward(self, patches_TP: torch.Tensor, grids: Sequence[Grid], outs: Sequence[torch.Tensor]) -> None:
        """Encode packed items and write each embedding into its own tensor of `outs`.

        `patches_TP` are normalised patch rows of all items, `[T, 3 * patch * patch]`, in the model's dtype. Each of
        `outs` is contiguous `[num_tokens, text_width]` of the same dtype and device; the last product writes there
        directly. An item sees no other; what it is packed with can change
        the order of sums and so its last bits (docs/verification.md). Raises `ImageError` for a bad grid.
        """
        plan = plan_pack(grids, self.config, patches_TP.device)
        self.mm_projector(self.vision_tower(patches_TP, plan), plan, outs)


class VisionTower(nn.Module):
    """Patches to merged tokens: `[T, P]` to `[N, merge * merge, D]`."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(config)
        self.encoder = Blocks(config)
        self.tokens_shape = (-1, config.merge_size**2, config.hidden_size)

    def forward(self, patches_TP: torch.Tensor, plan: PackPlan) -> torch.Tensor:
        x_TD: torch.Tensor = self.encoder(self.patch_embed(patches_TP, plan), plan)
        merged_TD = x_TD.index_select(0, plan.merge_order)
        if plan.has_frames:
            merged_TD = _pool_frames(merged_TD, plan)
        return merged_TD.view(self.tokens_shape)


class PatchEmbed(nn.Module):
    """The patch projection, a convolution whose stride is its kernel, plus the resampled positions."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size)
        self.pos_emb = PositionTable(config)

    def forward(self, patches_TP: torch.Tensor, plan: PackPlan) -> torch.Tensor:
        x_TD = nn.functional.linear(patches_TP, self.proj.weight.flatten(1), self.proj.bias)
        return x_TD.add_(self.pos_emb(plan).to(x_TD.dtype))


class PositionTable(nn.Module):
    """A learned table over height and width, resampled to each grid, plus fixed sines and cosines over frames."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.pos_time = config.pos_time
        self.weight = nn.Parameter(torch.empty(config.pos_height, config.pos_width, config.hidden_size))

    def forward(self, plan: PackPlan) -> torch.Tensor:
        table = self.weight.float().flatten(0, 1)
        position_TD = nn.functional.embedding_bag(plan.tap_index, table, per_sample_weights=plan.tap_weight, mode="sum")
        if plan.has_frames:
            # Row 0 adds nothing: the frame of a single image. Row f + 1 is frame f of several.
            position_TD += nn.functional.pad(self.frame_table(), (0, 0, 1, 0))[plan.frame]
        return position_TD

    def frame_table(self) -> torch.Tensor:
        """Return what is added to each frame of several, `[frames, D]` in float32."""
        width, device = self.weight.shape[-1], self.weight.device
        frequencies = 1.0 / 10000.0 ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
        angles = torch.arange(self.pos_time, device=device)[:, None] * frequencies
        return torch.cat((angles.sin(), angles.cos()), dim=1)


class Blocks(nn.Module):
    """The transformer blocks and the last LayerNorm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x_TD: torch.Tensor, plan: PackPlan) -> torch.Tensor:
        for block in self.blocks:
            x_TD = block(x_TD, plan)
        out_TD: torch.Tensor = self.final_layernorm(x_TD)
        return out_TD


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and added to the residual stream in place."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.qkv_shape = (-1, 3, config.num_heads, config.head_dim)
        self.norm0 = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.norm1 = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.wqkv = nn.Linear(hidden, 3 * hidden)
        self.wo = nn.Linear(hidden, hidden)
        self.mlp = MLP(config)

    def forward(self, x_TD: torch.Tensor, plan: PackPlan) -> torch.Tensor:
        x_TD += self._attend(self.norm0(x_TD), plan)
        x_TD += self.mlp(self.norm1(x_TD))
        return x_TD

    def _attend(self, x_TD: torch.Tensor, plan: PackPlan) -> torch.Tensor:
        qkv_T3Hd: torch.Tensor = self.wqkv(x_TD).view(self.qkv_shape)
        rotate_pairs_(qkv_T3Hd[:, :2], plan.rotation)
        out_THd = packed_attention(qkv_T3Hd[:, 0], qkv_T3Hd[:, 1], qkv_T3Hd[:, 2], plan.cu_seqlens)
        out_TD: torch.Tensor = self.wo(out_THd.flatten(1))
        return out_TD


class MLP(nn.Module):
    """Two linear layers around a tanh GELU."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.hidden_size, config.mlp_size)
        self.fc1 = nn.Linear(config.mlp_size, config.hidden_size)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        out_TD: torch.Tensor = self.fc1(nn.functional.gelu(self.fc0(x_TD), approximate="tanh"))
        return out_TD


class Projector(nn.Module):
    """Merged tokens to embeddings of the text model's width."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        merged = config.merged_width
        self.pre_norm = nn.LayerNorm(config.hidden_size, eps=config.projector_layer_norm_eps)
        self.proj = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, config.text_width))

    def forward(self, x_NmD: torch.Tensor, plan: PackPlan, outs: Sequence[torch.Tensor]) -> None:
        x_NC = self.pre_norm(x_NmD).flatten(1)
        if padding := -x_NC.shape[0] % ROW_MULTIPLE:
            x_NC = nn.functional.pad(x_NC, (0, 0, 0, padding))
        first, gelu, last = self.proj
        x_NC = gelu(first(x_NC))
        assert isinstance(last, nn.Linear), "the last layer's product is written into the outputs"
        for (start, end), out in zip(pairwise(plan.cu_tokens), outs, strict=True):
            torch.addmm(last.bias, x_NC[start:end], last.weight.t(), out=out)


def rotate_pairs_(x_TSHd: torch.Tensor, rotation_Tc: torch.Tensor) -> None:
    """Turn adjacent pairs of the last dimension in place, in float32 whatever the dtype: 2-D rotary embedding."""
    pairs_TSHc = torch.view_as_complex(x_TSHd.float().view(*x_TSHd.shape[:-1], -1, 2))
    pairs_TSHc *= rotation_Tc[:, None, None]
    if x_TSHd.dtype != torch.float32:
        x_TSHd.copy_(torch.view_as_real(pairs_TSHc).flatten(-2))


def _pool_frames(merged_TD: torch.Tensor, plan: PackPlan) -> torch.Tensor:
    """Mean over the frames of each item, in float32."""
    spans = zip(pairwise(plan.cu_seqlens), plan.grids, strict=True)
    means = [_mean(merged_TD[start:end], time) for (start, end), (time, _, _) in spans]
    return torch.cat(means).to(merged_TD.dtype)


def _mean(rows: torch.Tensor, time: int) -> torch.Tensor:
    return rows.view(time, -1, rows.shape[-1]).mean(0, dtype=torch.float32)
