"""Users' functions in place of a method's loss or advantages: how they are named, what they get, what they return."""
