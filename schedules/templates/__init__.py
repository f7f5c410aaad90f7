"""Kernels written with their loops, where the loop structure is the algorithm."""
