"""What a model costs before it is loaded: bytes (`cost`, `shapes`), speed (`bandwidth`), rows that fit (`plan`)."""
