"""``ambiseg.compare``: methods on the same images, with differences to one of them."""
