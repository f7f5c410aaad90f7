"""What runs from a bundle, on a machine without TVM: it needs NumPy, and PyTorch for a GPU."""
