"""The algorithms of the papers as plain loops, and the tests that the package keeps exactly the same tokens."""
