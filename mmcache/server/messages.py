"""What the sidecar says to its own processes, and they to it. Same frames as between client and sidecar."""

from __future__ import annotations

from pydantic import Field

from mmcache.protocol import Message


class StartDecoder(Message):
    """Carries the ingest region's descriptor."""

    seed: int
    max_pixels: int


class Probe(Message):
    """Hash an item, compare with its key, read its header; answered by `Probed`. Carries the memfd that holds it."""

    job_id: int
    namespace: str
    key: bytes
    kind: str
    header: bytes
    offset: int
    nbytes: int


class Probed(Message):
    """Size of an item's pixels, or the error that ended the job."""

    job_id: int
    width: int = 0
    height: int = 0
    error: str = ""
    reason: str = ""


class Fill(Message):
    """Decode a probed item into the ingest region at `offset`; answered by `Filled`."""

    job_id: int
    offset: int


class Filled(Message):
    """The pixels are in place, or the error that ended the job."""

    job_id: int
    error: str = ""
    reason: str = ""


class Drop(Message):
    """Forget a probed item."""

    job_id: int


class StartRank(Message):
    """Load the model and make the pool. Carries the ingest region's descriptor."""

    model: str
    device: str
    dtype: str
    num_threads: int
    pool_bytes: int


class RankReady(Message):
    """The model is loaded and warm. Carries the pool's descriptor, sealed."""

    weights_digest: bytes
    model_config_json: str
    processor_json: str
    numerics_version: int
    dim: int
    cost: list[float] = Field(min_length=3, max_length=3)


class StartFailed(Message):
    """The rank cannot start; it ends after this."""

    error: str
    reason: str


class Run(Message):
    """Encode one microbatch; columns. `sources` are offsets in the ingest region, `extents` in the rank's pool."""

    batch_id: int
    sources: list[int]
    heights: list[int]
    widths: list[int]
    extents: list[int]
    num_tokens: list[int]


class Ran(Message):
    """One microbatch is complete in the pool. `finite`: the guard's verdict for each item."""

    batch_id: int
    seconds: float
    finite: list[bool] = []
    error: str = ""


class Copy(Message):
    """Copy bytes from the ingest region into the rank's pool (a hit from a lower tier)."""

    copy_id: int
    source: int
    extent: int
    nbytes: int


class Copied(Message):
    """The copy is complete."""

    copy_id: int
