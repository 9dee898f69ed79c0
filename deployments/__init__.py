"""The stages of the graph: plain classes over pure functions, one module each."""
