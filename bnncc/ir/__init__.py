"""The graph of the compiler's front half, and what its operators mean: definitions in NumPy."""
