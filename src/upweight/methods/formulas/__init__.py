"""The formulas that methods are put together from."""
