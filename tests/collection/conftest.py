"""Keep pytest from importing the generators: they need torch or TensorFlow."""

collect_ignore = ["make_torch.py", "make_tf.py"]
