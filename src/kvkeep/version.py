"""The version, in the one place the build reads it from."""

__version__ = "0.1.0"
