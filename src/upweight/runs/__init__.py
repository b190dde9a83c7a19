"""A run folder, read and written without torch: its files, its record, its health, its report."""
