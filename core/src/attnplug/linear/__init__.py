"""Linear attention: layers whose memory is a state instead of keys and values."""
