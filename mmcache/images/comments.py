"""Comments of GIF and PNM files, bounded before Pillow reads them.

Pillow steps over a PNM's header byte by byte, cuts the comments of a plain PNM out of a block one by one, and joins
those of a GIF in the same way: that takes the square of their number.
"""

from __future__ import annotations

import re

from mmcache.errors import UndecodableImage

MAX_COMMENT_BLOCKS = 4096
"""Of a GIF, of 255 bytes each at most; and comments of a plain PNM."""

MAX_EXTENSION_BLOCKS = 1 << 20
MAX_JUNK_BYTES = 1 << 20
MAX_PNM_HEADER_BYTES = 1 << 20

_COMMENT, _APPLICATION = 0xFE, 0xFF
_PNM_COMMENT = re.compile(rb"#[^\r\n]*[\r\n]?")


def check_pnm(raw: memoryview) -> None:
    """Check a PNM's header and comments; anything else passes.

    Raises:
        UndecodableImage: more of either than a picture needs, or a plain PNM that is cut off.
    """
    magic = bytes(raw[:2])
    if magic[:1] != b"P" or magic[1:] not in (b"1", b"2", b"3", b"4", b"5", b"6", b"f", b"y", b"0"):
        return
    if raw.nbytes > MAX_PNM_HEADER_BYTES:
        tokens = _PNM_COMMENT.sub(b"", bytes(raw[:MAX_PNM_HEADER_BYTES])).split(maxsplit=4)
        if len(tokens) < (3 if magic in (b"P1", b"P4") else 4):
            raise UndecodableImage(f"its header has more than {MAX_PNM_HEADER_BYTES} bytes")
    if magic in (b"P1", b"P2", b"P3") and bytes(raw).count(b"#") > MAX_COMMENT_BLOCKS:
        raise UndecodableImage(f"it has more than {MAX_COMMENT_BLOCKS} comments")
    if magic in (b"P2", b"P3") and not bytes(raw[-1:]).isspace():  # a number cut in the middle is still a number
        raise UndecodableImage("truncated: a plain PNM ends with white space")


def check_gif(raw: memoryview) -> None:
    """Check what comes before the first frame of a GIF; anything else passes.

    Raises:
        UndecodableImage: more of it than a picture needs.
    """
    if bytes(raw[:6]) not in (b"GIF87a", b"GIF89a") or raw.nbytes < 13:
        return
    offset = 13 + (3 << (raw[10] & 7) + 1 if raw[10] & 128 else 0)
    num_blocks = num_comments = num_junk = 0
    while offset < raw.nbytes and raw[offset] not in b";,":
        if raw[offset] != 0x21:  # no extension: Pillow steps over the byte
            offset, num_junk = offset + 1, num_junk + 1
        else:
            is_comment = raw[offset + 1 : offset + 2] == bytes([_COMMENT])
            offset, num_new = _extension_end(raw, offset + 1)
            num_blocks, num_comments = num_blocks + num_new, num_comments + num_new * is_comment
        if num_comments > MAX_COMMENT_BLOCKS:
            raise UndecodableImage(f"its comments have more than {MAX_COMMENT_BLOCKS} blocks")
        if num_blocks > MAX_EXTENSION_BLOCKS or num_junk > MAX_JUNK_BYTES:
            raise UndecodableImage(f"more than {MAX_EXTENSION_BLOCKS} blocks or bytes come before its first frame")


def _extension_end(raw: memoryview, offset: int) -> tuple[int, int]:
    """End of the extension whose label is at `offset`, as Pillow has it, and its number of blocks, at least 1."""
    label = raw[offset] if offset < raw.nbytes else 0
    size, offset = _block(raw, offset + 1)
    num_blocks = 1
    if label == _APPLICATION and bytes(raw[offset - size : offset]).startswith(b"NETSCAPE2.0"):
        _, offset = _block(raw, offset)
    if label == _COMMENT and not size:
        return offset, num_blocks
    while True:  # of other extensions an empty first block is no end for Pillow
        size, offset = _block(raw, offset)
        if not size or num_blocks > MAX_EXTENSION_BLOCKS:
            return offset, num_blocks
        num_blocks += 1


def _block(raw: memoryview, offset: int) -> tuple[int, int]:
    """Size and end of a block; 0 at the end of the file."""
    size = raw[offset] if offset < raw.nbytes else 0
    return size, offset + 1 + size
