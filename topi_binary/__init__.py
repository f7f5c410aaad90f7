"""What is computed: binary operators as TE and TensorIR definitions, without scheduling."""
