"""Compiled networks: the file, what is in it, and running it on this machine."""
