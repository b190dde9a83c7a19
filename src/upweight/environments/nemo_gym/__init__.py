"""NeMo Gym: rows that its servers verify, tools that they offer, and the servers themselves."""
