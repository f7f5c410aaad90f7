"""The runner of a bundle, for a machine without TVM: it needs NumPy, and PyTorch for a GPU."""
