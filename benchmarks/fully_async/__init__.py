"""Fully asynchronous training beside synchronous: samples per second, on a stand-in engine with long-tailed times."""
