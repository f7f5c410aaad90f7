"""Autotuning: search the design spaces of the rules for the fastest points on a machine."""
