"""Starting and describing a vLLM server."""
