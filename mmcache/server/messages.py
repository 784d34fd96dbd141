"""What the sidecar says to its own processes, and they to it. Same frames as between client and sidecar."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from encoder.sharding import NUM_NUMBERS
from mmcache.framing import Message


def pixels_shape(num_frames: int, height: int, width: int) -> tuple[int, ...]:
    """Shape of an item's RGB pixels in the ingest region: of a picture (no frames), or of a video chunk."""
    return (num_frames, height, width, 3) if num_frames else (height, width, 3)


class StartDecoder(Message):
    """Carries the ingest region's descriptor."""

    seed: int
    max_pixels: int
    orientation: str


class StartRank(Message):
    """Load the model and make the pool. Carries the ingest region's descriptor.

    `has_pool`: carries the descriptor of device memory too, of `pool_bytes`, which a rank before this one left.
    `num_sharing`: ranks on the same device, this one too. `makes_digests`: of what it encodes, for checks.
    """

    model: str
    device: str
    dtype: str
    num_threads: int
    num_sharing: int = 1
    pool_bytes: int
    has_pool: bool = False
    device_bytes: int = 0
    has_high_priority: bool = False
    attention: str = "auto"
    graph_bytes: int = 0
    makes_digests: bool = False
    seed: int
    deterministic: bool = False
    known: dict[str, str] = {}
    costs: dict[str, list[float]] = {}


class ModelReport(Message):
    """A model that a rank has loaded. `identity`: of its files, empty if that is not to be trusted.

    `cost`: the numbers of its `CostModel`. `cost_identity`: of the conditions that they hold for. `max_patches`: of a
    batch, that fit into the memory that is free beside weights and pool; 0 if nothing limits it. `bytes_per_patch`:
    what a batch takes there. `acceleration`: what it uses of a GPU, as `encoder.device_options.Acceleration` has it.
    """

    weights_digest: bytes
    identity: str
    model_config_json: str
    processor_json: str
    numerics_version: int
    dim: int
    cost: list[float] = Field(min_length=NUM_NUMBERS, max_length=NUM_NUMBERS)
    cost_identity: str
    max_patches: int = 0
    bytes_per_patch: int = 0
    acceleration: dict[str, str | int] = {}


class RankReady(ModelReport):
    """The model is loaded and warm. Carries the pool's descriptor, if it was made, and not handed to this rank.

    `device`: UUID of the device that the pool is on; empty for host memory, which is sealed.
    """

    pool_bytes: int
    device: str = ""


class Load(Message):
    """Load a model beside the one in use, which goes on; answered by `Loaded`, then followed by SWAP or UNLOAD."""

    model: str
    known: dict[str, str] = {}
    costs: dict[str, list[float]] = {}


class Loaded(Message):
    """The model waits for its turn, or the error why not; one in `ConfigError` when its settings are wrong."""

    report: ModelReport | None = None
    error: str = ""
    reason: str = ""


class Swap(Message):
    """What is sent after this is for the model that waits; the one before it is dropped."""


class Unload(Message):
    """Drop the model that waits."""


class StartFailed(Message):
    """The rank cannot start; it ends after this. `lost_pool`: because it cannot use the pool that it was handed."""

    error: str
    reason: str
    lost_pool: bool = False


class Claim(Message):
    """What an item in a staging region claims to be: the rank hashes what it reads."""

    region: int
    key: bytes
    namespace: str
    kind: str
    header: bytes


class MapRegion(Message):
    """A staging region, of which claims will speak. Carries its descriptor."""

    region: int


class UnmapRegion(Message):
    """No claim speaks of the region any more."""

    region: int


class Run(Message):
    """Encode one microbatch; columns. `sources` are offsets in the ingest region, `extents` in the rank's pool.

    `num_frames`: of video chunks; 0 for a picture. `claims`: items that lie in a staging region instead, by their
    place in the columns; their other columns but `extents` and `num_tokens` are of no meaning.
    """

    batch_id: int
    sources: list[int]
    num_frames: list[int]
    heights: list[int]
    widths: list[int]
    extents: list[int]
    num_tokens: list[int]
    claims: dict[int, Claim] = {}


class Ran(Message):
    """One microbatch is complete in the pool. `finite`: the guard's verdict for each item.

    `false_claims`: items that were not encoded, because their bytes are not those of their key. `failure`: why none
    of them was encoded, in `error` for people; after "memory" the rank goes on with other batches as it does after
    "error". `max_patches`: as in `ModelReport`, from now on. `acceleration`: likewise; empty after a failure.
    `digests`: of the items' bytes (`encoder.digest`), if they are made; None for what was not encoded.
    """

    batch_id: int
    seconds: float
    finite: list[bool] = []
    false_claims: list[int] = []
    failure: Literal["", "memory", "error"] = ""
    error: str = ""
    max_patches: int = 0
    acceleration: dict[str, str | int] = {}
    digests: list[int | None] = []


class Copy(Message):
    """Copy bytes from the ingest region into the rank's pool: a hit from a lower tier, or what a client put.

    `guard`: say whether they are finite, too, as values of this dtype.
    """

    copy_id: int
    source: int
    extent: int
    nbytes: int
    guard: Literal["", "float32", "bfloat16", "float16"] = ""


class CopyOut(Message):
    """Copy an extent of the rank's device memory into the ingest region; answered by `Copied`."""

    copy_id: int
    target: int
    extent: int
    nbytes: int


class Copied(Message):
    """The copy is complete. `finite`: the guard's verdict, where it was asked for."""

    copy_id: int
    finite: bool = True


class Compare(Message):
    """Compare two extents of the rank's pool, embeddings of one item: how far is the cached one from the fresh one?

    `digest`: of the cached one's bytes when it was encoded; None if that is not known.
    """

    compare_id: int
    cached: int
    fresh: int
    num_tokens: int
    digest: int | None = None


class Compared(Message):
    """The answer; see `encoder.difference.Difference`. Numbers may be infinite or NaN. `error`: why there is none.

    `is_intact`: its digest is what it was; also where that is not known.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")

    compare_id: int
    is_intact: bool = True
    is_same_bits: bool = False
    relative_error: float = 0.0
    min_cosine: float = 0.0
    error: str = ""
