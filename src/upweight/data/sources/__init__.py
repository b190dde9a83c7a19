"""Opens raw rows from hub datasets, files and folders, and applies users' transforms to them."""
