"""An OpenAI-compatible endpoint on this machine for a model in this process, with a chat page."""
