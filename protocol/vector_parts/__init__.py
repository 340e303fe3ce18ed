"""What make_vectors.py and the tests build good and bad bytes from; no part of the installation."""
