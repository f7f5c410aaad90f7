"""How each operator runs on each instruction set."""
