"""The EXIF data of an AVIF, checked before Pillow reads its directory, which it does while it opens the file."""

from __future__ import annotations

from mmcache.images.jpeg_segments import without_prefixes
from mmcache.images.tiff_directory import check_directory
from mmcache.media import DAMAGE

MAX_NUMBERS = 1 << 16
"""Pillow may write the whole directory anew, with the orientation of `irot` and `imir`."""


def check_avif(raw: memoryview) -> None:
    """Check the EXIF data of an AVIF; anything else passes.

    The decoder itself is asked for it: where an item lies in a file is a long story (`iloc`, extents, tracks).

    Raises:
        UndecodableImage: its directory holds more than a picture needs.
    """
    if bytes(raw[4:8]) != b"ftyp":
        return
    try:
        from PIL import _avif

        info = _avif.AvifDecoder(bytes(raw), "auto", 1).get_info()
    except (ImportError, *DAMAGE):  # what is wrong will be said when the file is opened
        return
    for blob in info:
        if isinstance(blob, bytes):
            check_directory(without_prefixes(blob), MAX_NUMBERS)
