"""Pure functions on media: URL policy, fetching, decoding, hashing. No Ray, no torch, no transformers."""
