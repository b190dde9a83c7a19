"""Trained models outside of training: text generation, and scores of reward models."""
