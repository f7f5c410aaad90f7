"""Whether a compiled network is right: beside its model, layer by layer, and when it is made."""
