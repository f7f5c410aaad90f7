"""Passes over the graph, from an imported model to packed, fused layers."""
