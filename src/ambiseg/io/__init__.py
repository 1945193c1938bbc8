"""Files of pixels: formats in and out."""
