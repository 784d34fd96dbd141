"""What a C library says on standard error about a picture, taken as the damage that it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from mmcache.errors import UndecodableImage

MAX_BYTES = 4096


@contextmanager
def refused_complaints() -> Iterator[None]:
    """Whatever is written to descriptor 2 meanwhile does not reach it, and fails the picture.

    For a process that decodes one picture at a time.

    Raises:
        UndecodableImage: with the first line.
    """
    kept = os.dup(2)
    said = os.memfd_create("mmcache-said", os.MFD_CLOEXEC)
    try:
        os.dup2(said, 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
        text = os.pread(said, MAX_BYTES, 0).decode(errors="replace").strip()
    finally:
        os.close(kept)
        os.close(said)
    if text:
        raise UndecodableImage(f"damaged: {text.splitlines()[0][:200]}")
