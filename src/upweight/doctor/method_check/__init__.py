"""Whether a method has the properties that training relies on, tried on small batches and a tiny model."""
