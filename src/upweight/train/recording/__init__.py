"""What a training leaves behind and what watches it: checkpoints, metrics, callbacks, trackers, the model card."""
