"""The data sets, one module or folder each."""
