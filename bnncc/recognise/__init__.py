"""What the user wrote, and what it is: signs, quantizers, binary and few-bit layers."""
