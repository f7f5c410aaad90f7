"""The graph of the compiler's front end, and the semantics of its operators in NumPy."""
