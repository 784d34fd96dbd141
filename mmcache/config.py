"""Settings of a sidecar: each with its rule and description; "auto" settled, then frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from encoder.device_options import ATTENTION_NAMES, GRAPH_BYTES
from mmcache import config_rules as rules
from mmcache.paths import check_socket
from mmcache.sizes import parse_size

Size = Annotated[int, BeforeValidator(parse_size)]
PageSize = Annotated[Size, AfterValidator(rules.page_rounded)]
Number = Annotated[int, BeforeValidator(rules.no_bool)]


def _setting(description: str, rule: str, default: Any = ..., **bounds: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"rule": rule}, **bounds)


class Settings(BaseModel):
    """What a sidecar runs with: checked, resolved and frozen. Sizes are bytes.

    Every field has a description, shown in `mmcache serve --help`. `state` and `socket` have no default here because
    theirs depend on the environment: `load_settings` supplies them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    model: Annotated[str, AfterValidator(rules.check_model)] = _setting(
        "a checkpoint folder, or a preset with random weights: moonvit-tiny, kimi-k2.5",
        "a preset's name or a folder",
        "moonvit-tiny",
        min_length=1,
    )
    device: Annotated[Literal["cpu", "cuda"], BeforeValidator(rules.resolve_device)] = _setting(
        "where the encoder runs: auto, cpu or cuda", "auto, cpu or cuda", "auto"
    )
    ranks: Annotated[int, BeforeValidator(rules.resolve_ranks)] = _setting(
        "encoder processes: auto (2 on a CPU, one a CUDA device) or a number",
        "auto or a whole number, 1 to 64",
        "auto",
        ge=1,
        le=64,
    )
    decoders: Annotated[int, BeforeValidator(rules.resolve_decoders)] = _setting(
        "processes that decode pictures: auto (one for every two cores that the sidecar may use, 1 to 8) or a number",
        "auto or a whole number, 1 to 64",
        "auto",
        ge=1,
        le=64,
    )
    dtype: Annotated[Literal["float32", "bfloat16"], BeforeValidator(rules.resolve_dtype)] = _setting(
        "of the encoder and its embeddings: auto (float32 on a CPU, bfloat16 on CUDA), float32 or bfloat16",
        "auto, float32 or bfloat16",
        "auto",
    )
    pool_bytes: Annotated[PageSize, BeforeValidator(rules.resolve_pool_bytes)] = _setting(
        "memory for embeddings, per rank, fixed and touched at start, rounded up to the page: auto (256MiB of host "
        "memory, or 4GiB of a CUDA device) or a size",
        "auto or a size from 1MiB to 64TiB",
        "auto",
        ge=1 << 20,
        le=64 << 40,
    )
    ingest_bytes: PageSize = _setting(
        "memory for decoded pictures on their way to the ranks, rounded up to the page",
        "a size from 1MiB to 64TiB",
        384 << 20,
        ge=1 << 20,
        le=64 << 40,
    )
    state: Annotated[Path, AfterValidator(rules.absolute)] = _setting(
        "folder of the key seed and the default store [default: $XDG_STATE_HOME/mmcache or ~/.local/state/mmcache]",
        "a folder",
    )
    store: Annotated[str, AfterValidator(rules.check_store), BeforeValidator(rules.resolve_store)] = _setting(
        f"where embeddings outlive the sidecar: auto ({rules.STORE_FILE} in the state folder), none or file:///PATH",
        "auto, none or file:///PATH",
        "auto",
    )
    store_bytes: Size = _setting(
        "largest size of the file store; the oldest entries make room when it is full",
        "a size from 16MiB to 64TiB",
        16 << 30,
        ge=16 << 20,
        le=64 << 40,
    )
    socket: Annotated[Path, AfterValidator(check_socket)] = _setting(
        "Unix socket [default: $XDG_RUNTIME_DIR/mmcache.sock, or mmcache.sock in the state folder of the environment]; "
        "clients find it by the same rule or by MMCACHE_SOCKET",
        "a path",
    )
    control_words: Number = _setting(
        "leases that one connection may hold at once", "a whole number, 64 to 1048576", 16384, ge=64, le=1 << 20
    )
    staging_bytes: PageSize = _setting(
        "memory in which one client stages pixels, made when it first does, rounded up to the page",
        "a size from 1MiB to 64TiB",
        64 << 20,
        ge=1 << 20,
        le=64 << 40,
    )
    staging_bytes_total: PageSize = _setting(
        "most memory in which all clients together stage pixels",
        "a size from 1MiB to 64TiB",
        512 << 20,
        ge=1 << 20,
        le=64 << 40,
    )
    lease_limit_s: Annotated[float, BeforeValidator(rules.no_bool)] = _setting(
        "a lease held for longer, in seconds, meets the lease-limit-action; 0 for no limit",
        "a number, 0 to 86400",
        0.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
    )
    lease_limit_action: Annotated[Literal["quarantine", "kill"], BeforeValidator(rules.lower)] = _setting(
        "quarantine counts and lists the lease, kill ends its process", "quarantine or kill", "quarantine"
    )
    max_item_bytes: Size = _setting(
        "largest encoded item taken", "a size from 1KiB to 4GiB", 256 << 20, ge=1 << 10, le=4 << 30
    )
    max_pixels: Number = _setting(
        "largest picture taken, width times height",
        "a whole number, 1 to 10000000000",
        100_000_000,
        ge=1,
        le=10_000_000_000,
    )
    orientation: Literal["exif", "ignore"] = _setting(
        "of encoded files: exif turns a picture as its EXIF orientation says, ignore leaves it as it is stored",
        "exif or ignore",
        "exif",
    )
    decode_timeout_s: Annotated[float, BeforeValidator(rules.no_bool)] = _setting(
        "longest that decoding one picture may take, in seconds; the decoder is replaced then",
        "a number, 0.1 to 3600",
        10.0,
        ge=0.1,
        le=3600,
        allow_inf_nan=False,
    )
    encode_timeout_s: Annotated[float, BeforeValidator(rules.resolve_encode_timeout)] = _setting(
        "longest that a rank may take for one batch or copy, in seconds, before it is replaced: auto (30 and 20 times "
        "what is predicted) or a number",
        "auto or a number, 1 to 86400",
        "auto",
        ge=0,
        le=86400,
        allow_inf_nan=False,
    )
    deterministic: bool = _setting(
        "make embeddings bit-identical on one type of device, whatever they are encoded with; slower",
        "true or false",
        False,
    )
    verify_sample: Number = _setting(
        "encode one hit in this many again and compare, if its client still has the bytes; 0 for never",
        "a whole number, 0 to 1000000000",
        0,
        ge=0,
        le=1_000_000_000,
    )
    max_batch_patches: Number = _setting(
        "most patches in one forward pass; a larger item is encoded alone",
        "a whole number, 4 to 1048576",
        16384,
        ge=4,
        le=1 << 20,
    )
    batch_wait_ms: Annotated[float, BeforeValidator(rules.no_bool)] = _setting(
        "longest that a rank which has just finished waits for pictures that are being decoded, to begin them together",
        "a number, 0 to 1000",
        0.5,
        ge=0,
        le=1000,
        allow_inf_nan=False,
    )
    max_queued_items: Number = _setting(
        "most items that are looked up, decoded or encoded at once; what is beyond fails at once as overloaded",
        "a whole number, 1 to 1048576",
        16384,
        ge=1,
        le=1 << 20,
    )
    max_patches_per_second: Number = _setting(
        "most patches that a rank begins to encode in a second, on the mean, for the good of an engine on its device; "
        "0 for no limit",
        "a whole number, 0 to 1000000000",
        0,
        ge=0,
        le=1_000_000_000,
    )
    device_bytes: Size = _setting(
        "most memory of a CUDA device that a rank takes for weights and activations, beside its pool; 0 for no limit",
        "a size from 0 to 64TiB",
        0,
        ge=0,
        le=64 << 40,
    )
    attention: Annotated[str, AfterValidator(rules.check_attention)] = _setting(
        "which kernel does attention on a CUDA device in half precision: auto (the fastest of those that are installed "
        f"and right, measured at start) or one of {', '.join(ATTENTION_NAMES)}",
        f"auto or one of {', '.join(ATTENTION_NAMES)}",
        "auto",
    )
    graph_bytes: Size = _setting(
        "most memory of a CUDA device that a rank's CUDA graphs may take, which make small batches faster; 0 for none",
        "a size from 0 to 64GiB",
        GRAPH_BYTES,
        ge=0,
        le=64 << 30,
    )
    stream_priority: Annotated[Literal["low", "high"], BeforeValidator(rules.lower)] = _setting(
        "of a rank's work on a CUDA device, against that of other processes under MPS: low or high",
        "low or high",
        "low",
    )
    drain_timeout_s: Annotated[float, BeforeValidator(rules.no_bool)] = _setting(
        "longest wait for running requests and store writes at shutdown, in seconds",
        "a number, 0 to 3600",
        10.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
    )
    store_timeout_ms: Number = _setting(
        "longest wait for one look-up or read of the store, in milliseconds",
        "a whole number, 1 to 60000",
        1000,
        ge=1,
        le=60_000,
    )
    write_behind_bytes: Size = _setting(
        "most bytes waiting to be written to the store; beyond it embeddings are not stored, and counted",
        "a size from 0 to 64TiB",
        256 << 20,
        ge=0,
        le=64 << 40,
    )
    http: Annotated[str, AfterValidator(rules.check_http)] = _setting(
        "where metrics and health are served over HTTP, to whoever can connect: HOST:PORT (port 0: any that is free) "
        "or off",
        "HOST:PORT or off",
        "127.0.0.1:9464",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(rules.lower)] = _setting(
        "least severe messages shown: debug, info, warning or error", "debug, info, warning or error", "info"
    )

    log_format: Annotated[Literal["console", "json"], BeforeValidator(rules.lower)] = _setting(
        "of the log, which goes to standard error: console for people, json for one object a line",
        "console or json",
        "console",
    )

    @property
    def store_path(self) -> Path | None:
        """The store's file, or None without a store."""
        return None if self.store == "none" else Path(unquote(urlsplit(self.store).path))

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of `http`, or None if it is off."""
        return None if self.http == "off" else rules.host_and_port(self.http)

    @property
    def decoding(self) -> str:
        """Canonical text of the settings that decide the pixels of a file, for the fingerprint."""
        return f'{{"orientation":"{self.orientation}"}}'
