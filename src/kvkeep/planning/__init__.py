"""What a model costs before it is loaded: bytes, FLOPs, rows that fit, and the speed that bandwidth allows."""
