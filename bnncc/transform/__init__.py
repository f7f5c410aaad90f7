"""Passes from the model's graph to the graph of kernels, in the order given in `pipeline`."""
