"""The commands that give a trained model to others: `merge-lora`, `export`, `gguf` and `serve`."""
