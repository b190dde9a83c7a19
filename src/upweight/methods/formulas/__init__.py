"""The formulas of the methods: losses, advantages and features."""
