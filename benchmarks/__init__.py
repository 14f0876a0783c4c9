"""Measurements of this project beside what else could be used. Part of a checkout, not of the installed package.

`miles-mooncake bench` runs them; docs/benchmarks.md says what each measures and how.
"""
