"""Rewards: user functions, built-ins and reward models, run so that none of them can hang or break a run."""
