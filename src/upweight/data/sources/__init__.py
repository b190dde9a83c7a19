"""Raw rows: hub datasets, files and folders, and users' transforms of them."""
