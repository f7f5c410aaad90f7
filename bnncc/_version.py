"""The version, in one place: setuptools, ``bnncc --version`` and manifests read it here."""

__version__ = "0.1.0.dev0"
