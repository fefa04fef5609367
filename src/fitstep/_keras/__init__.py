"""The only folder that touches private Keras names, each with its feature test."""
