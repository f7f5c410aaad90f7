"""Recognition of signs, quantizers, and binary and few-bit layers in the model's graph."""
