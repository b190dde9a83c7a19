"""Teachers in the loop: models and servers that score the student's rows."""
