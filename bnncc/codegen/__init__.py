"""Code generation from the physical graph: Relax, LLVM, C without a runtime, GPU binaries."""
