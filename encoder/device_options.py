"""How a GPU is used, as the caller decides it. Free of torch."""

from dataclasses import dataclass
from typing import Final

GRAPH_BYTES: Final = 256 << 20
AUTO: Final = "auto"
ATTENTION_NAMES: Final = (
    "fa3", "flash-attn-4", "flash-attn-3", "flash-attn-2", "cudnn", "torch-varlen", "triton", "sdpa",
)  # fmt: skip
"""Of the kernels in `encoder.attention.BACKENDS`."""


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What changes no more than rounding.

    `attention`: a kernel's name in `encoder.attention.BACKENDS`, or `auto`, which measures. `graph_bytes`: most bytes
    of device memory that CUDA graphs may take; 0 for no graphs.
    """

    attention: str = AUTO
    graph_bytes: int = GRAPH_BYTES


@dataclass(frozen=True, slots=True)
class Acceleration:
    """What an encoder uses of a GPU. `attention`: names of kernels, for little work and for much if they differ; empty
    for the plain model. `graph_failure`: why no graph can be captured, if so."""

    attention: str = ""
    num_graphs: int = 0
    num_graphs_evicted: int = 0
    graph_bytes: int = 0
    graph_failure: str = ""
