"""What runs inside a miles job. Only `object_store.py`, `delayed_split.py` and `data_buffer.py` import miles."""
