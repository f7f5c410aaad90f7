"""Specs, data layouts and unscheduled TensorIR definitions of the binary operators."""
