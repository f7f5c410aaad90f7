"""Check compiled networks against their models, layer by layer, and during compilation."""
