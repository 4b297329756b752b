"""The conversations that ``write.py`` writes, as plain data: one module for each file."""
