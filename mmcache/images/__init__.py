"""Picture files: their headers and pixels, as Pillow gives them and as the reference turns and converts them."""
