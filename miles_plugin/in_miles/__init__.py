"""What runs inside a miles job. Only `object_store.py` and `delayed_split.py` import miles."""
