"""Every decoder of transformers, tried with kvkeep on tiny random models: what docs/models.md is made from."""
