"""The record of a training: checkpoints, metrics, completions, callbacks, the model card."""
