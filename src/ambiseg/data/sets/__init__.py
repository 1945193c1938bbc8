"""The data sets, one module or folder each."""

RELEASED_SPLIT = "mose"  # the split of LIDC that was released with the paper, as settings and stores call it
