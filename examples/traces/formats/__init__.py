"""How conversations become the records of a format: one module for each file."""
