"""Training of the embedded model: data, tokenizer, curriculum, evaluation and export."""
