"""A trained model for other programs: merged folders with a model card, GGUF files, Modelfiles, the hub."""
