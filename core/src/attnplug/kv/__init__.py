"""KV pools, id spaces and the translator between a request's positions and a kernel's indices."""
