"""Bundles: kernels and networks to check and time on a machine without bnncc and TVM."""
