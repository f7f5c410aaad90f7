"""Passes over Relax, from an imported graph to packed, fused layers."""
