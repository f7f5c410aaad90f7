"""From the physical graph to machine code: Relax, LLVM, C for bare machines, cubins for GPUs."""
