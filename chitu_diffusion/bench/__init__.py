"""The bench: what is measured, how, and what is stored with a number."""
