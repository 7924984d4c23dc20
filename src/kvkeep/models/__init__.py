"""Models: the transformers adapter (`attention`), loading (`load`), prompts (`tokenization`), the embedded `tiny`."""
