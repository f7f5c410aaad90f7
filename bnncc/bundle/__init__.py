"""Bundles: kernels and networks to be checked and timed on a machine without bnncc and TVM."""
