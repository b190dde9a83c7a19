"""Load a model and its tokenizer, attach adapters, keep float32 masters and a reference, write the result."""
