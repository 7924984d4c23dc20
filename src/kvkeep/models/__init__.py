"""Models: the transformers adapter (`hf`), loading (`load`), prompts (`text`), and the embedded model (`tiny`)."""
