"""The engine: a model's variables, the programs of its step, and the loops that run them."""
