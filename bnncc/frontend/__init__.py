"""Readers of model files: each format becomes ONNX, and ONNX the compiler's graph."""
