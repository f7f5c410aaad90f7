"""Autotuning: search the rules' spaces for the points that are fastest on a machine."""
