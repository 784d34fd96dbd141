"""The guard over embeddings: are they finite?"""

from collections.abc import Sequence

import torch


def all_finite(outs: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether it holds neither NaN nor infinity: one pass over each, one read of the device."""
    extremes = torch.stack([torch.stack(out.aminmax()) for out in outs])
    flags: list[bool] = extremes.isfinite().all(dim=1).tolist()
    return flags
