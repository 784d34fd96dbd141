"""What the encoder raises on purpose.

EncoderError
├── CheckpointError   a model folder or preset cannot be loaded
└── ImageError        pixels, grids or outputs that do not fit the encoder
"""


class EncoderError(Exception):
    """Base of the encoder's errors."""


class CheckpointError(EncoderError):
    """A model folder or preset cannot be loaded. The message lists every tensor or setting at fault."""


class ImageError(EncoderError, ValueError):
    """An item cannot be encoded: its pixels, grid or output tensor break a rule that the message names."""
