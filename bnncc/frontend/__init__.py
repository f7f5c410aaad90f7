"""Readers of model files: ONNX and PyTorch to Relax."""
