"""Mooncake between two hosts, over any protocol, beside the link and a raw baseline."""
