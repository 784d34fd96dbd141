"""The rules of settings: how "auto" is settled, and what is refused."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import ValidationInfo

from encoder.device_options import ATTENTION_NAMES, AUTO
from ipc.devices import num_devices

STORE_FILE = "embeddings.lmdb"

FUTURE_STORES = ("redis", "rediss", "redis+sentinel", "redis+cluster")


def page_rounded(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number, not a truth value")
    return value


def resolve_device(value: object) -> object:
    if value == "cuda":
        if not num_devices():
            raise ValueError("no CUDA device is visible to this process: use auto or cpu, or see CUDA_VISIBLE_DEVICES")
        if not has_driver_api():
            raise ValueError("cuda needs the package cuda-bindings: install mmcache[gpu]")
    if value == "auto":
        return "cuda" if num_devices() and has_driver_api() else "cpu"
    return value


def has_driver_api() -> bool:
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def resolve_ranks(value: object, info: ValidationInfo) -> object:
    if value == "auto":
        return num_devices() if info.data.get("device") == "cuda" else 2
    return no_bool(value)


def resolve_decoders(value: object) -> object:
    if value == "auto":
        return min(8, max(1, len(os.sched_getaffinity(0)) // 2))
    return no_bool(value)


def resolve_pool_bytes(value: object, info: ValidationInfo) -> object:
    if value == "auto":
        return 4 << 30 if info.data.get("device") == "cuda" else 256 << 20
    return value


def resolve_encode_timeout(value: object) -> object:
    """Of auto, 0: the limit follows what is predicted of each."""
    if value == "auto":
        return 0.0
    with suppress(TypeError, ValueError):
        if not isinstance(value, bool) and (number := float(value)) >= 1:  # type: ignore[arg-type]
            return number
    raise ValueError("must be auto or a number, 1 to 86400")


def resolve_dtype(value: object, info: ValidationInfo) -> object:
    if value == "auto":
        return "bfloat16" if info.data.get("device") == "cuda" else "float32"
    return value


def resolve_store(value: object, info: ValidationInfo) -> object:
    if value == "auto" and "state" in info.data:
        return (info.data["state"] / STORE_FILE).as_uri()
    return value


def check_store(value: str) -> str:
    if value in {"none", "auto"}:  # still "auto" only when the state folder is wrong, and that error is shown
        return value
    scheme, _, rest = value.partition("://")
    if rest and scheme in FUTURE_STORES:
        raise ValueError(f"a store of kind {scheme}:// is not available yet: use file:///PATH or none")
    if not rest or scheme != "file":
        raise ValueError("unknown kind of store: must be auto, none or file:///PATH")
    url = urlsplit(value)
    if url.netloc or url.query or url.fragment or unquote(url.path).endswith("/") or "\0" in unquote(url.path):
        raise ValueError("a file store is file:///PATH: three slashes, an absolute path of a file, no host")
    return value


def check_http(value: str) -> str:
    if value.lower() == "off":
        return "off"
    host_and_port(value)
    return value


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of HOST:PORT, or of [HOST]:PORT, as IPv6 needs it. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    is_bracketed = host[:1] == "[" and host[-1:] == "]"
    host = host[1:-1] if is_bracketed else host
    is_host = host and not set(host) & set("/[] @") and (is_bracketed or ":" not in host)
    if not colon or not is_host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464, or off")
    return host, int(port)


def check_model(value: str) -> str:
    from encoder.errors import CheckpointError
    from encoder.source import resolve_model

    try:
        resolve_model(value)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    return value


def check_attention(value: str) -> str:
    if value.lower() not in (AUTO, *ATTENTION_NAMES):
        raise ValueError(f"unknown kernel: must be {AUTO} or one of {', '.join(ATTENTION_NAMES)}")
    return value.lower()


def lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def absolute(path: Path) -> Path:
    return path.expanduser().absolute()
