"""Models: the transformers adapter (`hf`) and the embedded model (`tiny`)."""
