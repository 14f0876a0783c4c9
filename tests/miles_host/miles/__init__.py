"""A host of miles's shape: the names and calls that this project meets there, and no more. Not miles's code."""
