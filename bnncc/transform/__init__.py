"""From the graph of a model to that of kernels: passes, in the order of `pipeline`."""
