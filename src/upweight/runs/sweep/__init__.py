"""Many runs of one config with different keys: which, one after the other, and a table of how they did."""
