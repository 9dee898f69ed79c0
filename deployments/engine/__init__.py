"""Engines that run the model behind one small protocol."""
