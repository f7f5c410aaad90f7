"""Kernels whose loops are the algorithm: written as they run, on named instructions."""
