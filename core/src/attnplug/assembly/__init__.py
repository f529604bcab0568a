"""Building of backends: what they get, and how they are put together."""
