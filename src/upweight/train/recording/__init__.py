"""The record of a training: checkpoints, metrics, callbacks, trackers, the model card."""
